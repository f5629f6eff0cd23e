"""A GGUF without quantized tensors from one with, for peers that should read as many bytes per weight as we do.

    python benchmarks/peers/make_dense_gguf.py IN.gguf OUT.gguf {bf16,f16,f32}

Vectors (norms) stay float32, as llama.cpp keeps them.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

TYPES = {
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
}
# Written anew, or about the quantization that goes away.
SKIPPED = ("general.architecture", "general.file_type", "general.quantization_version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("type", choices=sorted(TYPES))
    args = parser.parse_args()
    file_type, tensor_type = TYPES[args.type]

    reader = gguf.GGUFReader(args.source)
    writer = gguf.GGUFWriter(args.target, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in SKIPPED:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, element)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if values.ndim == 1 or args.type == "f32":
            writer.add_tensor(tensor.name, values)
        elif args.type == "f16":
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            packed = gguf.quantize(values, tensor_type)
            writer.add_tensor(tensor.name, packed, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
