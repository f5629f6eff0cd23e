"""Padding and copying heads for tensor parallelism leaves what attention computes unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)

H, E = 4, 6
ATTENTION = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=H,
    query_scale=0.5,
    rope=RopeSpec((1.0, 0.1)),
    qkv_bias=True,
)
SPEC = DecoderSpec(
    vocab_size=11,
    max_position_embeddings=16,
    embed_dim=E,
    layers=(LayerSpec(ATTENTION, GatedMlpSpec(10)),),
    norm=NormSpec(),
    tied_head=False,
)


def spec_with(**changes) -> DecoderSpec:
    attention = replace(ATTENTION, **changes)
    return replace(SPEC, layers=(LayerSpec(attention, GatedMlpSpec(10)),))


def read(plan, path: tuple[str, ...], tensors: dict[str, np.ndarray]) -> np.ndarray:
    source = plan[path]
    assert tuple(tensors[name].shape for name in source.names) == source.shapes
    return source.assemble([tensors[name] for name in source.names])


@given(
    num_kv_heads=st.integers(1, 6),
    queries_per_kv=st.integers(1, 5),
    tensor_parallel_size=st.integers(1, 8),
    layout=st.sampled_from([None, "stacked", "grouped"]),
)
def test_heads_compute_the_same(
    num_kv_heads: int, queries_per_kv: int, tensor_parallel_size: int, layout: str | None
) -> None:
    num_heads = num_kv_heads * queries_per_kv
    spec = spec_with(num_heads=num_heads, num_kv_heads=num_kv_heads, qkv_bias=False)
    dims = ShardedDims.create(spec, tensor_parallel_size)
    heads = dims.heads(spec.layers[0].attention)
    assert heads.num_kv_heads % tensor_parallel_size == 0
    # No more than what rounding up to the devices costs.
    assert heads.num_kv_heads < num_kv_heads * heads.kv_replicas + tensor_parallel_size

    rng = np.random.default_rng(0)
    q = rng.normal(size=(num_heads, H, E))
    k, v = rng.normal(size=(2, num_kv_heads, H, E))
    o = rng.normal(size=(E, num_heads, H))
    x = rng.normal(size=E)
    expected = sum(  # each query head n with kv head n // G, the attention replaced by a product
        o[:, n] @ ((q[n] @ x) * np.tanh(k[n // queries_per_kv] @ x) + v[n // queries_per_kv] @ x)
        for n in range(num_heads)
    )

    layer = "model.layers.0.self_attn."
    tensors = {
        f"{layer}{p}_proj.weight": t.reshape(-1, E) for p, t in zip("qkv", (q, k, v), strict=True)
    }
    grouped = np.concatenate(
        [q.reshape(num_kv_heads, -1, H, E), k[:, None], v[:, None]], axis=1
    ).reshape(-1, E)
    stacked = np.concatenate([t.reshape(-1, E) for t in (q, k, v)])
    tensors[f"{layer}qkv_proj.weight"] = grouped if layout == "grouped" else stacked
    tensors[f"{layer}o_proj.weight"] = o.reshape(E, -1)
    names = Names(qkv=("self_attn.qkv_proj",), qkv_layout=layout) if layout else Names()
    plan = decoder_plan(spec, dims, names)
    qkv = read(plan, ("layers", "0", "attention", "qkv"), tensors)
    projected = qkv @ x  # [K, G+2, H]
    keys, values = np.tanh(projected[:, -2:-1]), projected[:, -1:]
    attended = projected[:, :-2] * keys + values
    out = np.einsum("kgh,ekgh->e", attended, read(plan, ("layers", "0", "attention", "o"), tensors))
    np.testing.assert_allclose(out, expected, atol=1e-9)


def test_three_kv_heads_on_two_devices_get_an_empty_group() -> None:
    dims = ShardedDims.create(SPEC, 2).heads(replace(ATTENTION, num_heads=9, num_kv_heads=3))
    assert (dims.kv_replicas, dims.num_kv_heads, dims.queries_per_kv) == (1, 4, 3)


def test_one_kv_head_on_four_devices_is_copied_and_its_queries_dealt_out() -> None:
    dims = ShardedDims.create(SPEC, 4).heads(replace(ATTENTION, num_heads=8, num_kv_heads=1))
    assert (dims.kv_replicas, dims.num_kv_heads, dims.queries_per_kv) == (4, 4, 2)


def test_vocabulary_mlp_and_biases_are_filled_up_with_zeros() -> None:
    dims = ShardedDims.create(SPEC, 4)
    plan = decoder_plan(SPEC, dims)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape)
        for source in plan.values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    for path, shape, axis, size in [
        (("embed",), (12, E), 0, 11),
        (("lm_head",), (12, E), 0, 11),
        (("layers", "0", "mlp", "gate_up"), (2, 12, E), 1, 10),
        (("layers", "0", "mlp", "down"), (E, 12), 1, 10),
    ]:
        leaf = read(plan, path, tensors)
        assert leaf.shape == shape
        kept, added = np.split(leaf, [size], axis=axis)
        assert np.abs(kept).min() > 0
        assert not added.any()
    bias = read(plan, ("layers", "0", "attention", "qkv_bias"), tensors)
    q_bias = tensors["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(bias[:, 0], q_bias.reshape(4, H))


def test_sizes_that_need_no_padding_are_views_of_the_checkpoint() -> None:
    plan = decoder_plan(SPEC, ShardedDims.create(SPEC, 1))
    tensor = np.ones((E, 10))
    leaf = plan["layers", "0", "mlp", "down"].assemble([tensor])
    assert np.shares_memory(leaf, tensor)


def test_no_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        ShardedDims.create(SPEC, 0)
