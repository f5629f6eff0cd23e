"""Writers of quantized checkpoints, from the formats' public definitions and independent of the readers: each gives the
tensors of one matrix, by suffix, and the float32 matrix that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]
Written = tuple[Tensors, np.ndarray]
E4M3, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


def _words(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """[n, m] unsigned to int32 [n, m * bits / 32]: bit field i of a word holds its value number `order[i]`."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    groups = values.astype(np.uint32).reshape(len(values), -1, per_word)
    words = np.zeros(groups.shape[:2], np.uint32)
    for i, which in enumerate(order):
        words |= groups[:, :, which] << np.uint32(bits * i)
    return words.view(np.int32)


def _grouped(weight: np.ndarray, group_size: int, bits: int, symmetric: bool):
    """Integer codes [out, in], scales and zero points [out, groups], by the range of each group."""
    top = 2**bits - 1
    groups = weight.reshape(len(weight), -1, group_size)
    if symmetric:
        scales = np.abs(groups).max(-1) / (2 ** (bits - 1) - 1)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / top
        zeros = np.round(-low / scales)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, top)
    values = ((codes - zeros[..., None]) * scales[..., None]).astype(np.float32)
    as_int = codes.astype(np.int64).reshape(weight.shape)
    return as_int, scales, zeros.astype(np.int64), values.reshape(weight.shape)


def awq(weight: np.ndarray, group_size: int = 32) -> Written:
    codes, scales, zeros, values = _grouped(weight, group_size, 4, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        ".qweight": _words(codes.T, 4, order),
        ".qzeros": _words(zeros.T, 4, order),
        ".scales": scales.T.astype(np.float16),
    }, values


def gptq(
    weight: np.ndarray,
    group_size: int = 32,
    bits: int = 4,
    symmetric: bool = True,
    version: int = 1,
    order: np.ndarray | None = None,
) -> Written:
    """`order`: the inputs in the order in which they were quantized, `group_size` of them a group."""
    group_size = weight.shape[1] if group_size == -1 else group_size
    order = np.arange(weight.shape[1]) if order is None else order
    codes, scales, zeros, values = _grouped(weight[:, order], group_size, bits, symmetric)
    back = np.argsort(order)
    stored = (zeros - (version == 1)) % 2**bits
    return {
        ".qweight": np.ascontiguousarray(_words(codes[:, back], bits).T),
        ".qzeros": _words(stored.T, bits),
        ".scales": scales.T.astype(np.float16),
        ".g_idx": (back // group_size).astype(np.int32),
    }, values[:, back]


def pack_quantized(
    weight: np.ndarray, group_size: int | None = 32, bits: int = 4, symmetric: bool = True
) -> Written:
    codes, scales, zeros, values = _grouped(weight, group_size or weight.shape[1], bits, symmetric)
    tensors = {
        ".weight_packed": _words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        per_word = 32 // bits
        padded = np.pad(zeros, ((0, -len(zeros) % per_word), (0, 0)))
        tensors[".weight_zero_point"] = np.ascontiguousarray(_words(padded.T, bits).T)
    return tensors, values


def int8(weight: np.ndarray, input_scale: float | None = None) -> Written:
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.round(weight / scales), -128, 127)
    tensors = {".weight": codes.astype(np.int8), ".weight_scale": scales}
    if input_scale is not None:
        tensors[".input_scale"] = np.array([input_scale], np.float32)
    return tensors, (codes * scales).astype(np.float32)


def fp8(weight: np.ndarray, scale: str = "channel", suffix: str = ".weight_scale") -> Written:
    """`scale`: "tensor", "channel" or "block"."""
    if scale == "block":
        rows, columns = -(-weight.shape[0] // 128), weight.shape[1] // 128
        padded = np.pad(weight, ((0, rows * 128 - len(weight)), (0, 0)))
        peaks = np.abs(padded.reshape(rows, 128, columns, 128)).max((1, 3))
        scales = (peaks / 448).astype(np.float32)
        wide = np.kron(scales, np.ones((128, 128), np.float32))[: len(weight)]
    else:
        peaks = np.abs(weight).max(1, keepdims=True) if scale == "channel" else np.abs(weight).max()
        scales = (
            (peaks / 448).astype(np.float32).reshape(-1, 1)
            if scale == "channel"
            else np.array([peaks / 448], np.float32)
        )
        wide = scales
    codes = (weight / wide).astype(E4M3)
    return {".weight": codes, suffix: scales}, codes.astype(np.float32) * wide


NF4_LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip


def nf4(weight: np.ndarray, nested: bool = False, block: int = 64) -> Written:
    flat = weight.reshape(-1, block)
    peaks = np.abs(flat).max(1).astype(np.float32)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "shape": list(weight.shape),
        "dtype": "float32",
    }
    tensors = {".weight.quant_map": NF4_LEVELS}
    if nested:
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = np.float32(peaks.mean())
        count = -(-len(peaks) // 256)
        padded = np.pad(peaks - offset, (0, count * 256 - len(peaks))).reshape(count, 256)
        coarse = np.abs(padded).max(1).astype(np.float32)
        codes = np.abs((padded / coarse[:, None])[..., None] - table).argmin(-1).astype(np.uint8)
        codes = codes.reshape(-1)[: len(peaks)]
        peaks = table[codes] * np.repeat(coarse, 256)[: len(peaks)] + offset
        tensors |= {
            ".weight.absmax": codes,
            ".weight.nested_absmax": coarse,
            ".weight.nested_quant_map": table,
        }
        state |= {
            "nested_blocksize": 256,
            "nested_offset": float(offset),
            "nested_dtype": "float32",
        }
    else:
        tensors[".weight.absmax"] = peaks
    codes = np.abs((flat / peaks[:, None])[..., None] - NF4_LEVELS).argmin(-1).astype(np.uint8)
    pairs = codes.reshape(-1, 2)
    tensors[".weight"] = ((pairs[:, 0] << 4) | pairs[:, 1]).reshape(-1, 1)
    tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(
        json.dumps(state).encode(), np.uint8
    )
    return tensors, (NF4_LEVELS[codes] * peaks[:, None]).reshape(weight.shape)


def mxfp4(weight: np.ndarray) -> Written:
    """Of experts [X, in, out], as gpt-oss has them; the suffixes begin with "_"."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    levels = np.concatenate([levels, -levels])
    rows = weight.swapaxes(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(np.int64) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - levels).argmin(-1).astype(np.uint8)
    values = (levels[codes] * np.exp2(exponents)[..., None]).astype(np.float32)
    return {
        "_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        "_scales": (exponents + 127).astype(np.uint8),
    }, np.ascontiguousarray(values.reshape(rows.shape).swapaxes(1, 2))


def compressed_tensors(
    weights: Mapping[str, Any],
    stored_as: str,
    inputs: Mapping[str, Any] | None = None,
    targets: tuple[str, ...] = ("Linear",),
) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class Format:
    """One way of storing a checkpoint's matrices, and how its config.json says so."""

    write: Callable[[np.ndarray], Written]
    config: dict[str, Any]
    bits: float
    """Per weight in memory, in theory."""
    options: dict[str, Any] = field(default_factory=dict)


def _linear(weights: Mapping[str, Any], stored_as: str, inputs: Mapping[str, Any] | None = None):
    return compressed_tensors(weights, stored_as, inputs)


def _integers(bits: int, group_size: int | None, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }


def _eight(kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}


FORMATS: dict[str, Format] = {
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        4.75,
    ),
    "gptq": Format(
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        4.5,
    ),
    "gptq-8bit": Format(
        lambda w: gptq(w, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
        8.5,
    ),
    "gptq-asymmetric": Format(
        lambda w: gptq(w, symmetric=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        4.75,
    ),
    "gptq-v2": Format(
        lambda w: gptq(w, bits=8, symmetric=False, version=2),
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2",
            "bits": 8,
            "group_size": 32,
            "sym": False,
        },
        8.75,
    ),
    "gptq-act-order": Format(
        lambda w: gptq(w, order=np.random.default_rng(w.shape[1]).permutation(w.shape[1])),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        4.5,
    ),
    "gptq-one-group": Format(
        lambda w: gptq(w, group_size=-1),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
        4.0,
    ),
    "w4a16": Format(pack_quantized, _linear(_integers(4, 32, True), "pack-quantized"), 5.0),
    "w4a16-asymmetric": Format(
        lambda w: pack_quantized(w, symmetric=False),
        _linear(_integers(4, 32, False), "pack-quantized"),
        5.25,
    ),
    "w8a16": Format(
        lambda w: pack_quantized(w, None, 8),
        _linear(_integers(8, None, True), "pack-quantized"),
        8.0,
    ),
    "w8a16-asymmetric": Format(
        lambda w: pack_quantized(w, 32, 8, False),
        _linear(_integers(8, 32, False), "pack-quantized"),
        9.25,
    ),
    "int8": Format(int8, _linear(_eight("int", "channel"), "int-quantized"), 8.0),
    "fp8-channel": Format(fp8, _linear(_eight("float", "channel"), "float-quantized"), 8.0),
    "fp8-tensor": Format(
        lambda w: fp8(w, "tensor"), _linear(_eight("float", "tensor"), "naive-quantized"), 8.0
    ),
    "nf4": Format(
        nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        4.5,
    ),
    "nf4-nested": Format(
        lambda w: nf4(w, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        4.5,
    ),
}
"""Whose matrices multiply what comes in as it is."""


def write_quantized(
    source: Path, out: Path, form: Format, quantized: Callable[[str], bool] | None = None
) -> Path:
    """Store the float32 checkpoint `source` quantized in `out`, and what it stands for in `out`/dequantized.

    `quantized`: whether a module's matrix is; without it all projections of the layers are.
    """
    plain = out / "dequantized"
    plain.mkdir(parents=True)
    tensors, expected = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if quantized(module) if quantized else module.endswith("_proj"):
            stored, value = form.write(value)
            tensors |= {module + suffix: np.ascontiguousarray(x) for suffix, x in stored.items()}
        else:
            tensors[name] = value
        expected[name] = np.ascontiguousarray(value)
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    return out
