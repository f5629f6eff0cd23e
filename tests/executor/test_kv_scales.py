"""Where the scales of an 8-bit KV cache come from."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.executor import kv_scales
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.reader import CheckpointError
from tests.models.paged_harness import load_checkpoint
from tests.tiny_checkpoints import tiny_checkpoint


class Reader:
    """A checkpoint of scales alone."""

    def __init__(self, tensors: dict[str, list[float] | float]):
        self.tensors = {name: np.float32(value) for name, value in tensors.items()}

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def file_of(self, name):
        return Path("model.safetensors")

    def read(self, name, dtype=None):
        return np.array(self.tensors[name], dtype)


def decoder(
    kv_dtype: str, tensor_parallel_size: int = 1, checkpoint: str = "llama"
) -> FunctionalDecoder:
    description, _, _ = load_checkpoint(tiny_checkpoint(checkpoint))
    mesh = make_mesh(tensor_parallel_size)
    return FunctionalDecoder.create(description.spec, mesh, "float32", kv_dtype)


def test_float8_takes_the_checkpoints_scales_and_1_where_there_are_none():
    model = decoder("float8_e4m3fn", tensor_parallel_size=4, checkpoint="qwen3")
    attention = model.spec.layers[0].attention
    heads, copies = attention.num_kv_heads, model.dims.heads(attention).kv_replicas
    assert heads == 2 and copies == 2, "the checkpoint has changed"
    scales = kv_scales.make_scales(
        model,
        {},
        Reader(
            {
                "model.layers.0.self_attn.k_scale": 0.25,
                "model.layers.0.self_attn.v_proj.v_scale": [0.5],
                "language_model.model.layers.1.self_attn.attn.k_scale": [2.0, 3.0],
                "model.layers.1.mlp.k_scale": 7.0,
            }
        ),
    )
    values = {path[1:]: np.asarray(x).tolist() for path, x in scales.items()}
    others = {path: x for path, x in values.items() if path[0] not in ("0", "1")}
    assert set(map(tuple, others.values())) <= {(1.0,) * 4}
    assert {path: x for path, x in values.items() if path not in others} == {
        ("0", "attention", "k_scale"): [0.25] * 4,
        ("0", "attention", "v_scale"): [0.5] * 4,
        ("1", "attention", "k_scale"): [2.0, 2.0, 3.0, 3.0],
        ("1", "attention", "v_scale"): [1.0] * 4,
    }
    for path, scale in scales.items():
        assert scale.sharding.is_equivalent_to(model.leaves[path].sharding, 1)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), [1.0, 2.0]])
def test_scales_that_make_no_sense_are_refused(bad):
    reader = Reader({"model.layers.0.self_attn.k_scale": bad})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_scale .* positive number"):
        kv_scales.make_scales(decoder("float8_e4m3fn"), {}, reader)


def test_a_cache_of_the_models_dtype_has_none():
    _, model, _ = load_checkpoint(tiny_checkpoint("llama"))
    assert kv_scales.make_scales(model, {}, Reader({})) == {}


def test_int8_scales_put_the_largest_numbers_of_every_head_at_four_fifths():
    _, plain, leaves = load_checkpoint(tiny_checkpoint("llama"))
    model = decoder("int8")
    weights = dict(zip(plain.leaves, leaves, strict=True))
    weights |= kv_scales.make_scales(model, weights, Reader({}))
    T = min(kv_scales.CALIBRATION_TOKENS, model.spec.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(model.spec.vocab_size, size=T)
    places = jnp.arange(T, dtype=jnp.int32)
    batch = RaggedBatch(
        token_ids=jnp.asarray(tokens, jnp.int32),
        positions=places,
        slot_mapping=places,
        query_start_loc=jnp.array([0, T], jnp.int32),
        seq_lens=jnp.array([T], jnp.int32),
        block_tables=jnp.zeros((1, 1), jnp.int32),
        decode_only=False,
    )
    cache = tuple(
        tuple(jnp.zeros(x.shape, x.dtype) for x in layer) for layer in model.kv_cache_shapes(1, T)
    )
    _, cache = jax.jit(model.forward)([weights[path] for path in model.leaves], batch, cache)
    first, *later = ([np.abs(np.asarray(x, int)).max(axis=(0, 2, 3)) for x in kv] for kv in cache)
    assert {*first[0], *first[1]} == {round(127 / 1.25)}
    # Later layers see what the first has rounded.
    assert all(95 <= x <= 108 for kv in later for heads in kv for x in heads)
