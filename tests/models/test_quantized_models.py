"""Models whose weights stay quantized in memory, through the paged path: against transformers on the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.gguf import GGUFReader
from tests.models.architectures.entry import Entry, checkpoint
from tests.models.paged_harness import PagedRunner, load_checkpoint, load_model
from tests.weights import quantized_files as files
from tests.weights.quantized_files import FORMATS, Format, write_quantized

LLAMA = Entry(
    "llama",
    "quantized",
    dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
)
PROMPTS = [[5, 17, 44, 8, 91, 30, 2], [60, 3]]
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
IN_A_MODEL = (
    "awq",
    "gptq-act-order",
    "gptq-v2",
    "gptq-one-group",
    "int8",
    "fp8-tensor",
    "nf4",
)
"""One format of each kind of arrays: tests of checkpoints have all."""
PROJECTIONS = 2 * (64 * (128 + 64 + 64) + 128 * 64 + 3 * 128 * 64)
"""Weights of the model's projections."""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def write(name: str) -> Path:
        return write_quantized(
            checkpoint(LLAMA), tmp_path_factory.mktemp(name) / "q", FORMATS[name]
        )

    return write


def logits_and_tokens(model: FunctionalDecoder, leaves: list[jax.Array]):
    runner = PagedRunner(model, leaves, budget=8, compiler_options=COMPILER_OPTIONS)
    return runner.greedy(PROMPTS, num_new_tokens=4)


def assert_as_transformers(model: FunctionalDecoder, leaves: list[jax.Array], plain: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for tokens, logits in zip(*logits_and_tokens(model, leaves), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens[:-1]])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def stored_bytes(model: FunctionalDecoder, leaves: list[jax.Array]) -> int:
    paths = [path for path in model.leaves if "parts" in path]
    return sum(x.nbytes for p, x in zip(model.leaves, leaves, strict=True) if p in set(paths))


@pytest.mark.parametrize("name", IN_A_MODEL)
def test_logits_of_each_format(name: str, quantized) -> None:
    directory = quantized(name)
    _, model, leaves = load_checkpoint(directory)
    assert len(model.layouts) == 2 * 4, "all projections stay quantized"
    assert_as_transformers(model, leaves, directory / "dequantized")


@pytest.mark.parametrize("name", ["gptq-act-order", "w4a16-asymmetric", "fp8-channel"])
def test_two_devices_share_what_is_quantized(name: str, quantized) -> None:
    directory = quantized(name)
    _, model, leaves = load_checkpoint(directory, tensor_parallel_size=2)
    # Inputs in an order of their own can't be shared out: the matrices that add up over devices are dequantized.
    assert len(model.layouts) == (4 if name == "gptq-act-order" else 8)
    assert_as_transformers(model, leaves, directory / "dequantized")


def test_parts_of_one_leaf_in_several_formats(tmp_path: Path) -> None:
    """Values and the first layer's queries are not quantized."""
    directory = write_quantized(
        checkpoint(LLAMA),
        tmp_path / "q",
        FORMATS["awq"],
        lambda m: m.endswith("_proj") and not m.endswith(("v_proj", "layers.0.self_attn.q_proj")),
    )
    for devices in (2, 1):
        _, model, leaves = load_checkpoint(directory, devices)
        layout = model.layouts["layers", "0", "attention", "qkv"]
        assert [part.format is not None for part in layout.parts] == [False, True, False]
        assert_as_transformers(model, leaves, directory / "dequantized")


def test_an_8_bit_embedding_that_is_the_head_too(tmp_path: Path) -> None:
    tied = replace(LLAMA, variant="tied", config=LLAMA.config | {"tie_word_embeddings": True})
    config = files.compressed_tensors(
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "int-quantized",
        targets=("Embedding",),
    )
    form = Format(files.int8, config, 8.0)
    directory = write_quantized(
        checkpoint(tied), tmp_path / "q", form, lambda m: m.endswith("embed_tokens")
    )
    for devices in (1, 2):
        _, model, leaves = load_checkpoint(directory, devices)
        assert set(model.layouts) == {("embed",)}
        assert_as_transformers(model, leaves, directory / "dequantized")


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-8bit", "w8a16", "int8", "nf4", "nf4-nested"])
def test_bytes_in_memory(name: str, quantized) -> None:
    _, model, leaves = load_checkpoint(quantized(name))
    bits = 8 * stored_bytes(model, leaves) / PROJECTIONS
    assert bits == pytest.approx(FORMATS[name].bits, rel=0.06), "scales of rows beside it"


@pytest.mark.parametrize("quantized_inputs", ["int8", "fp8"])
def test_inputs_are_quantized_where_the_format_says_so(quantized_inputs: str, tmp_path: Path):
    """Within the rounding of 8-bit inputs of what exact inputs give, and not the same."""
    kind = "int" if quantized_inputs == "int8" else "float"
    eight = {"num_bits": 8, "type": kind, "symmetric": True}
    config = files.compressed_tensors(
        eight | {"strategy": "channel"},
        f"{kind}-quantized",
        eight | {"strategy": "token", "dynamic": True},
    )
    form = Format(getattr(files, quantized_inputs), config, 8.0)
    directory = write_quantized(checkpoint(LLAMA), tmp_path / "q", form)
    _, model, leaves = load_checkpoint(directory)
    _, exact = logits_and_tokens(*load_checkpoint(directory, dequantize=True)[1:])
    _, found = logits_and_tokens(model, leaves)
    for one, other in zip(found, exact, strict=True):
        error = np.abs(one[:2] - other[:2]).max()
        assert 1e-4 < error < 0.1 * np.abs(other).max()


def test_orders_that_differ_within_a_leaf_are_refused(tmp_path: Path) -> None:
    orders = iter(range(1000))
    form = replace(
        FORMATS["gptq-act-order"],
        write=lambda w: files.gptq(
            w, order=np.random.default_rng(next(orders)).permutation(w.shape[1])
        ),
    )
    directory = write_quantized(checkpoint(LLAMA), tmp_path / "q", form)
    with pytest.raises(ValueError, match=r"q_proj\.weight and .*k_proj\.weight .*g_idx"):
        load_checkpoint(directory)
    load_checkpoint(directory, dequantize=True)


@pytest.mark.real
@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_a_gguf_kept_quantized_gives_the_logits_of_its_dequantized_weights(
    model: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    reader = GGUFReader(path)
    description = describe_model(reader.config(), max_model_len=64)
    decoder = FunctionalDecoder.create(description.spec, make_mesh(1), "float32")
    stored, leaves = load_model(reader, description, decoder)
    in_file = sum(info.nbytes for info in reader.file.tensors.values())
    assert sum(leaf.nbytes for leaf in leaves) == pytest.approx(in_file, rel=0.05)
    found = logits_and_tokens(stored, leaves)
    expected = logits_and_tokens(*load_model(reader, description, decoder, dequantize=True))
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-3)


GPT_OSS = Entry(
    "gpt_oss",
    "quantized",
    dict(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
)
QWEN3_MOE = Entry(
    "qwen3_moe",
    "quantized",
    dict(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    ),
)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    form = Format(files.mxfp4, {"quant_method": "mxfp4"}, 4.25)
    source = checkpoint(GPT_OSS)
    directory = write_quantized(
        source,
        tmp_path / "q",
        form,
        lambda m: m.endswith(("_up_proj", "experts.down_proj")),
    )
    _, model, leaves = load_checkpoint(directory, 2)
    assert len(model.layouts) == 2 * 2
    assert_as_transformers(model, leaves, directory / "dequantized")
    weights = sum(np.prod(layout.shape) for layout in model.layouts.values())
    assert 8 * stored_bytes(model, leaves) / weights == pytest.approx(4.25, rel=1e-6)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_one_by_one(expert_parallel: bool, tmp_path: Path) -> None:
    directory = write_quantized(
        checkpoint(QWEN3_MOE),
        tmp_path / "q",
        FORMATS["awq"],
        lambda m: ".experts." in m and m.endswith("_proj"),
    )
    _, model, leaves = load_checkpoint(directory, 2, expert_parallel=expert_parallel)
    assert set(model.layouts) == {("layers", "0", "mlp", "gate_up"), ("layers", "0", "mlp", "down")}
    assert_as_transformers(model, leaves, directory / "dequantized")


DEEPSEEK = Entry(
    "deepseek_v3",
    "quantized",
    dict(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
)


def test_latent_attention_and_experts_of_fp8_blocks(tmp_path: Path) -> None:
    """What expands the latents is dequantized, all other projections stay as they are."""
    form = Format(
        lambda w: files.fp8(w, "block"),
        files.compressed_tensors(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "float-quantized",
        ),
        8.25,
    )
    names = ("_proj", "_proj_with_mqa")
    directory = write_quantized(
        checkpoint(DEEPSEEK), tmp_path / "q", form, lambda m: m.endswith(names)
    )
    _, model, leaves = load_checkpoint(directory, 2)
    of_layer = {path[2:] for path in model.layouts if path[1] == "1"}
    attention = {("attention", name) for name in ("q_down", "q_up", "kv_down", "o")}
    experts = {("mlp", name) for name in ("gate_up", "down")}
    shared = {("mlp", "shared", name) for name in ("gate_up", "down")}
    assert of_layer == attention | experts | shared
    assert_as_transformers(model, leaves, directory / "dequantized")
