"""GGUF files of llama and gemma3 models, read as the Hugging Face checkpoint they were made from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.weights.gguf_config import architecture_of, config_of, token_ids_of
from jaxinfer.weights.gguf_file import GGUFFile, TensorInfo, read_gguf_header
from jaxinfer.weights.gguf_quants import dequantize_rows
from jaxinfer.weights.quantization import ggml
from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.reader import CheckpointError, aligned_empty, numpy_dtype, read_bytes

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_OF = {
    "llama": _BLOCK | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _BLOCK
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Rotary divisors are part of the configuration.
_NOT_WEIGHTS = {"rope_freqs.weight"}
_DIRECT = {("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")}


class GGUFReader:
    """A `CheckpointReader` and a `QuantizedSource`. Raises `CheckpointError` on opening where the file is cut short, split over several files,
    or of an architecture that isn't supported."""

    holds_leaves = False

    def __init__(self, path: Path) -> None:
        self.file = read_gguf_header(path)
        self.path = path
        if self.file.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one part of a split GGUF; merge the parts (gguf-split --merge) first."
            )
        self._architecture = architecture_of(self.file)
        self._config = config_of(self.file)
        self._infos = dict(self._hugging_face_names(self.file))
        size = path.stat().st_size
        for info in self.file.tensors.values():
            if info.offset + info.nbytes > size:
                raise _truncated(info, path)
        self._handle = path.open("rb")

    def _hugging_face_names(self, file: GGUFFile):
        block = _BLOCK_OF[self._architecture]
        for name, info in file.tensors.items():
            if name in _NOT_WEIGHTS:
                continue
            if name in _WHOLE:
                yield _WHOLE[name], info
                continue
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if match is None or match[2] not in block:
                raise CheckpointError(
                    f"Tensor {name} in {self.path} is not part of a {self._architecture} model as it is known here."
                )
            yield f"model.layers.{match[1]}.{block[match[2]]}.{match[3]}", info

    @property
    def metadata(self) -> dict[str, Any]:
        return self.file.metadata

    @property
    def dtype(self) -> str:
        return self._config["dtype"]

    def names(self) -> Collection[str]:
        return self._infos.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape

    def file_of(self, name: str) -> Path:
        return self.path

    def config(self) -> dict[str, Any]:
        return self._config

    def generation_config(self) -> dict[str, Any] | None:
        return dict(token_ids_of(self.file)) or None

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        info = self._infos[name]
        dtype = numpy_dtype("float32") if dtype is None else dtype
        rows = self._row_order(name, info)
        is_shifted = self._architecture == "gemma3" and name.endswith("norm.weight")
        out = aligned_empty(info.shape, dtype)
        if (info.type_name, dtype.name) in _DIRECT and rows is None and not is_shifted:
            self._fill(info, out.reshape(-1).view(np.uint8))
            return out
        raw = np.empty(info.nbytes, np.uint8)
        self._fill(info, raw)
        # A vector is one row, or as many as it has entries where those change places.
        count = info.shape[0] if len(info.shape) > 1 or rows is not None else 1
        raw = raw.reshape(count, -1)
        target = np.empty(info.shape, np.float32) if is_shifted else out
        dequantize_rows(
            info.type_name, raw if rows is None else raw[rows], target.reshape(count, -1)
        )
        if is_shifted:
            # llama.cpp multiplies by the weight, Gemma by 1 + weight: the conversion added the 1.
            out[...] = target - np.float32(1)
        return out

    @property
    def quantization(self) -> str:
        """Of files of floats too: they are GGUF all the same."""
        return "gguf"

    def format_of(self, name: str) -> MatrixFormat | None:
        info = self._infos[name]
        return ggml.FORMATS.get(info.type_name) if len(info.shape) > 1 else None

    def read_quantized(self, name: str) -> QuantizedMatrix:
        info, rows = self._infos[name], self._row_order(name, self._infos[name])
        raw = np.empty(info.nbytes, np.uint8)
        self._fill(info, raw)
        raw = raw.reshape(info.shape[0], -1)
        return ggml.matrix_of(info.type_name, raw if rows is None else raw[rows])

    def transposed(self, name: str) -> bool:
        return False

    def _row_order(self, name: str, info: TensorInfo) -> np.ndarray | None:
        """Order that undoes llama.cpp's for queries and keys: it rotates neighbours (2i, 2i + 1), Hugging Face halves
        (i, i + head_dim / 2)."""
        if self._architecture != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return None
        head_dim = self._config["head_dim"]
        return np.arange(info.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _fill(self, info: TensorInfo, out: np.ndarray) -> None:
        if not read_bytes(self._handle.fileno(), info.offset, out):
            raise _truncated(info, self.path)


def _truncated(info: TensorInfo, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut short: tensor {info.name} ends at byte {info.offset + info.nbytes}, the file at "
        f"{os.path.getsize(path)}."
    )
