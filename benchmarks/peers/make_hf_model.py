"""A Hugging Face directory with bfloat16 weights, from any model that jaxinfer reads: peers run the same numbers.

python benchmarks/peers/make_hf_model.py smollm2-135m OUT_DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.weights.resolve import open_checkpoint, resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("out_dir", type=Path)
    args = parser.parse_args()

    files = resolve_model(args.model)
    reader = open_checkpoint(files)
    args.out_dir.mkdir(parents=True)
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {name: reader.read(name, dtype) for name in reader.names()}
    save_file(tensors, args.out_dir / "model.safetensors", metadata={"format": "pt"})
    Tokenizer.load(files).save(args.out_dir)
    config = {**reader.config(), "dtype": "bfloat16"}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", reader.generation_config() or {}),
    ):
        (args.out_dir / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
