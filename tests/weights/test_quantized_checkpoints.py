"""What quantized checkpoints stand for, against the formats' definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.weights.quantization.config import QuantizationConfig
from jaxinfer.weights.quantization.ggml import FORMATS as GGML_FORMATS
from jaxinfer.weights.quantization.ggml import matrix_of
from jaxinfer.weights.quantization.reader import QuantizedReader
from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.resolve import ModelFiles, open_checkpoint
from tests.weights import quantized_files as files
from tests.weights.quantized_files import FORMATS, Format
from tests.weights.test_gguf_quants import random_blocks

MODULE = "model.layers.0.mlp.down_proj"


def matrix(rows: int = 48, columns: int = 128, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]):
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        directory / "model.safetensors",
    )
    return open_checkpoint(ModelFiles("hf", directory))


def module_checkpoint(directory: Path, form: Format, **changes: np.ndarray | None):
    tensors, _ = form.write(matrix())
    tensors = {MODULE + suffix: value for suffix, value in tensors.items()}
    for suffix, value in changes.items():
        name = f"{MODULE}.{suffix}"
        assert name in tensors
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return checkpoint(directory, form.config, tensors)


FP8_DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MORE_FORMATS = FORMATS | {
    "fp8": Format(lambda w: files.fp8(w, "tensor"), FP8_DYNAMIC, 8.0),
    "fp8-rows": Format(files.fp8, FP8_DYNAMIC, 8.0),
    "fp8-blocks": Format(
        lambda w: files.fp8(w, "block", ".weight_scale_inv"),
        FP8_DYNAMIC | {"weight_block_size": [128, 128]},
        8.25,
    ),
    "fp8-static": Format(
        lambda w: (
            files.fp8(w, "tensor")[0] | {".input_scale": np.array(0.5, np.float32)},
            files.fp8(w, "tensor")[1],
        ),
        FP8_DYNAMIC | {"activation_scheme": "static"},
        8.0,
    ),
    "ct-blocks": Format(
        lambda w: files.fp8(w, "block"),
        files.compressed_tensors(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "float-quantized",
        ),
        8.25,
    ),
}


@pytest.mark.parametrize("name", MORE_FORMATS)
def test_the_matrix_is_what_its_format_defines(name: str, tmp_path: Path) -> None:
    form, weight = MORE_FORMATS[name], matrix(rows=160, columns=256)
    tensors, expected = form.write(weight)
    reader = checkpoint(tmp_path, form.config, {MODULE + s: v for s, v in tensors.items()})
    assert isinstance(reader, QuantizedReader)
    assert set(reader.names()) == {f"{MODULE}.weight"}
    assert reader.shape(f"{MODULE}.weight") == weight.shape
    found = reader.read(f"{MODULE}.weight")
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - weight).max() < 0.2 * np.abs(weight).max()
    half = reader.read(f"{MODULE}.weight", np.dtype(np.float16))
    np.testing.assert_array_equal(half, expected.astype(np.float16))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((3, 64, 10)).astype(np.float32)
    tensors, expected = files.mxfp4(weight)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {name + suffix: value for suffix, value in tensors.items()}
    reader = checkpoint(tmp_path, {"quant_method": "mxfp4"}, stored)
    assert set(reader.names()) == {name}
    assert reader.shape(name) == weight.shape
    np.testing.assert_array_equal(reader.read(name), expected)


def test_mxfp4_as_transformers_reads_it(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, _ = files.mxfp4(np.random.default_rng(1).standard_normal((2, 64, 6)).astype("f4"))
    name = "mlp.experts.down_proj"
    stored = {name + suffix: value for suffix, value in tensors.items()}
    reader = checkpoint(tmp_path, {"quant_method": "mxfp4"}, stored)
    expected = convert_moe_packed_tensors(
        *(torch.tensor(tensors[suffix]) for suffix in ("_blocks", "_scales")), dtype=torch.float32
    )
    np.testing.assert_array_equal(reader.read(name), expected.numpy())


@pytest.mark.parametrize("type_name", GGML_FORMATS)
def test_ggml_blocks_equal_the_gguf_package(type_name: str) -> None:
    raw = random_blocks(type_name, 5, 512)
    found = matrix_of(type_name, raw)
    assert found.shape == (5, 512)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]).reshape(5, 512)
    np.testing.assert_array_equal(found.dequantize(np.empty((5, 512), np.float32)), expected)


def test_an_embedding_group_and_what_is_left_out(tmp_path: Path) -> None:
    config = files.compressed_tensors(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        "mixed-precision",
    )
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = {
        "targets": ["Embedding"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": None,
        "format": "int-quantized",
    }
    config["ignore"] = ["lm_head", "re:.*mlp.gate$"]
    down, expected_down = files.pack_quantized(matrix(), symmetric=False)
    embed, expected_embed = files.int8(matrix(seed=1))
    plain = {"lm_head.weight": matrix(seed=2), "model.layers.0.mlp.gate.weight": matrix(seed=3)}
    stored = {MODULE + s: v for s, v in down.items()} | plain
    stored |= {"model.embed_tokens" + s: v for s, v in embed.items()}
    reader = checkpoint(tmp_path, config, stored)
    expected = plain | {
        f"{MODULE}.weight": expected_down,
        "model.embed_tokens.weight": expected_embed,
    }
    assert set(reader.names()) == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(reader.read(name), value)
    assert reader.format_of("model.embed_tokens.weight").activation is None
    assert reader.format_of("lm_head.weight") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported; supported: awq"),
        ({"bits": 4}, "lacks quant_method"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits 3 of awq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "group_size 16 .*32, 64, 128"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
            "version 'gemv' of awq .*'gemm'",
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 of gptq .*4, 8"),
        ({"quant_method": "gptq", "bits": 4}, "lacks group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 7}, "group_size 7 of gptq"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin'",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme 'other'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit True"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type 'fp4'"),
        (
            files.compressed_tensors({"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized"),
            "format 'nvfp4-pack-quantized'",
        ),
        (
            files.compressed_tensors(
                {"num_bits": 4, "strategy": "group", "group_size": 96}, "pack-quantized"
            ),
            "group_size 96 of compressed-tensors",
        ),
        (
            files.compressed_tensors(
                {"num_bits": 8, "strategy": "channel", "symmetric": False}, "int-quantized"
            ),
            "weights.symmetric False",
        ),
        (
            files.compressed_tensors(
                {"num_bits": 8, "strategy": "channel"},
                "int-quantized",
                {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False},
            ),
            "input_activations.symmetric",
        ),
    ],
)
def test_an_unsupported_scheme_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationConfig.from_config({"quantization_config": config})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"scales": None}, rf"lacks tensor {MODULE}\.scales of the quantized {MODULE}"),
        ("awq", {"scales": np.ones((3, 48), "f2")}, r"down_proj\.scales in .* has shape \(3, 48\)"),
        ("awq", {"scales": np.ones((4, 48), "f8")}, r"\.scales in .* has dtype float64; supported"),
        ("awq", {"qzeros": np.ones((4, 5), "i4")}, r"\.qzeros in .* expected \(4, 6\)"),
        ("awq", {"qweight": np.ones((100, 6), "i4")}, "has 100 inputs, no multiple of group_size"),
        ("awq", {"qweight": np.ones((128, 6), "i8")}, "has dtype int64; supported: int32"),
        ("gptq-act-order", {"g_idx": np.full(128, 4, "i4")}, "holds 4 to 4, the groups are 0 to 3"),
        ("gptq-act-order", {"g_idx": np.zeros(128, "i4")}, "gives group 0 128 inputs"),
        ("gptq-act-order", {"g_idx": None}, rf"lacks tensor {MODULE}\.g_idx"),
        ("gptq", {"g_idx": np.arange(128, dtype="i4")[::-1] // 32}, "though desc_act is false"),
        ("gptq", {"qzeros": np.zeros((4, 6), "i4")}, "zero points other than 8, though sym"),
        ("int8", {"weight_scale": None}, rf"lacks tensor {MODULE}\.weight_scale"),
        ("int8", {"weight_scale": np.ones((2, 1), "f4")}, r"has shape \(2, 1\), expected"),
        ("w4a16", {"weight_shape": np.array([48, 127])}, r"says \(48, 127\), the packed weight is"),
        ("w4a16-asymmetric", {"weight_zero_point": None}, r"lacks tensor .*\.weight_zero_point"),
        ("nf4", {"weight.absmax": np.ones(3, "f4")}, r"\.weight\.absmax in .* has shape \(3,\)"),
        ("nf4", {"weight.quant_map": np.ones(16, "f4")}, "is not NF4's"),
    ],
)
def test_a_damaged_module_names_the_tensor(
    name: str, changes: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    reader = module_checkpoint(tmp_path, FORMATS[name], **changes)
    with pytest.raises(CheckpointError, match=message):
        reader.shape(f"{MODULE}.weight")
        reader.read(f"{MODULE}.weight")


def test_a_quantized_module_that_the_config_leaves_out(tmp_path: Path) -> None:
    form = FORMATS["awq"]
    config = form.config | {"modules_to_not_convert": ["down_proj"]}
    tensors, _ = form.write(matrix())
    reader = checkpoint(tmp_path, config, {MODULE + s: v for s, v in tensors.items()})
    with pytest.raises(CheckpointError, match=r"qweight in .* doesn't say how"):
        reader.names()


def test_biases_of_zeros_that_gptq_adds_may_be_left(tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    tensors, _ = form.write(matrix())
    stored = {MODULE + s: v for s, v in tensors.items()}
    zeros = np.zeros(48, np.float16)
    reader = checkpoint(tmp_path, form.config, stored | {f"{MODULE}.bias": zeros})
    assert reader.ignored == (r"model\.layers\.0\.mlp\.down_proj\.bias",)
    reader = checkpoint(tmp_path, form.config, stored | {f"{MODULE}.bias": zeros + 1})
    assert reader.ignored == ()
