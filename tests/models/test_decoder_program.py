"""What XLA makes of a step: the cache updated in place, no gathers of weights or cache, layers lowered once."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.models.batch import PageTables, RaggedBatch
from jaxinfer.models.cache_groups import model_groups
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from jaxinfer.parallel.mesh import make_mesh

FULL = LayerSpec(
    AttentionSpec(
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        query_scale=0.25,
        rope=RopeSpec((1.0, 0.1, 0.01, 0.001)),
    ),
    GatedMlpSpec(128),
)
SLIDING = replace(FULL, attention=replace(FULL.attention, sliding_window=8))
NUM_LAYERS = 4
SPEC = DecoderSpec(
    vocab_size=512,
    max_position_embeddings=128,
    embed_dim=64,
    layers=(FULL,) * NUM_LAYERS,
    norm=NormSpec(),
    tied_head=True,
)


def lower(model: FunctionalDecoder, num_tokens: int, decode_only: bool) -> jax.stages.Lowered:
    def i32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    T, R = num_tokens, num_tokens if decode_only else 4
    batch = RaggedBatch(
        *(i32(T), i32(T), i32(T), i32(R + 1), i32(R), i32(R, 4), decode_only),
        more_tables=(PageTables(i32(T), i32(R, 4)),) * (len(model.groups) - 1),
    )
    leaves = list(model.leaves.values())
    step = jax.jit(model.forward, donate_argnums=2)
    return step.lower(leaves, batch, model.kv_cache_shapes(num_pages=512, page_size=16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_cache_is_updated_in_place(
    tensor_parallel_size: int, decode_only: bool, dtype: str
) -> None:
    model = FunctionalDecoder.create(SPEC, make_mesh(tensor_parallel_size), dtype)
    compiled = lower(model, 16, decode_only).compile()
    cache_bytes = NUM_LAYERS * 2 * 512 * 4 * 16 * 16 * jnp.dtype(dtype).itemsize
    use = compiled.memory_analysis()
    assert use.alias_size_in_bytes == cache_bytes // tensor_parallel_size
    # A layer's pages, or a copy of them in float32, would take this much.
    assert use.temp_size_in_bytes < cache_bytes / (2 * NUM_LAYERS) / tensor_parallel_size


@pytest.mark.parametrize(("tensor_parallel_size", "decode_only"), [(1, True), (2, False)])
def test_a_cache_that_groups_of_layers_share_is_updated_in_place(
    tensor_parallel_size: int, decode_only: bool
) -> None:
    spec = replace(SPEC, layers=(SLIDING, SLIDING, FULL) * 2)
    mesh = make_mesh(tensor_parallel_size)
    model = FunctionalDecoder.create(spec, mesh, "bfloat16", groups=model_groups(spec, 128))
    assert model.groups.windows == (None, 8, 8)
    compiled = lower(model, 16, decode_only).compile()
    # Two arrays of pages, where each of six layers would have its own.
    cache_bytes = 2 * 2 * 512 * 4 * 16 * 16 * 2
    use = compiled.memory_analysis()
    assert use.alias_size_in_bytes == cache_bytes // tensor_parallel_size
    assert use.temp_size_in_bytes < cache_bytes / 4 / tensor_parallel_size


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_a_layer_needs_two_all_reduces(tensor_parallel_size: int) -> None:
    model = FunctionalDecoder.create(SPEC, make_mesh(tensor_parallel_size), "bfloat16")
    found = collectives(lower(model, 16, decode_only=True).compile())
    # One more for the embedding, whose rows are spread over the devices.
    assert found == (["all-reduce"] * (2 * NUM_LAYERS + 1) if tensor_parallel_size > 1 else [])


@pytest.mark.parametrize("vocab_size", [512, 511])
def test_logits_are_gathered_not_the_head(vocab_size: int) -> None:
    spec = replace(SPEC, vocab_size=vocab_size, tied_head=False)
    model = FunctionalDecoder.create(spec, make_mesh(4), "float32")
    head = model.head(list(model.leaves.values()))
    assert head is model.leaves["lm_head",]
    hidden = jax.ShapeDtypeStruct((8, SPEC.embed_dim), jnp.float32)
    compiled = jax.jit(model.logits).lower(head, hidden).compile()
    assert collectives(compiled) == ["all-gather"]
    assert re.search(r"f32\[8,512\]\S* all-gather", compiled.as_text())


@pytest.mark.parametrize(
    ("layers", "kinds"), [((FULL,) * NUM_LAYERS, 1), ((SLIDING, SLIDING, FULL, SLIDING), 2)]
)
def test_equal_layers_are_lowered_once(layers: tuple[LayerSpec, ...], kinds: int) -> None:
    model = FunctionalDecoder.create(replace(SPEC, layers=layers), make_mesh(1), "float32")
    text = lower(model, 16, decode_only=True).as_text()
    assert len(re.findall(r"func\.func private @_run_layer\w*\(", text)) == kinds
    assert len(re.findall(r"call @_run_layer\w*\(", text)) == NUM_LAYERS


def test_leaves_are_few_and_carry_their_shardings() -> None:
    mesh = make_mesh(2)
    model = FunctionalDecoder.create(SPEC, mesh, "bfloat16")
    assert len(model.leaves) == 6 * NUM_LAYERS + 2
    qkv = model.leaves["layers", "3", "attention", "qkv"]
    assert (qkv.shape, qkv.dtype) == ((4, 4, 16, 64), jnp.bfloat16)
    assert qkv.sharding.shard_shape(qkv.shape) == (2, 4, 16, 64)
    ((k_pages, v_pages), *_) = model.kv_cache_shapes(num_pages=5, page_size=8)
    assert k_pages == v_pages
    assert k_pages.sharding.shard_shape(k_pages.shape) == (5, 2, 8, 16)
