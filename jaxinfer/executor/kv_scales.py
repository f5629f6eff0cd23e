"""The scales of an 8-bit KV cache: one per layer and kv head for keys and one for values, fixed when a model is loaded.

float8_e4m3fn takes those that the checkpoint brings, else 1: the type spans seven decimal orders, so a scale matters
little. int8 has equal steps, and a scale that is far off costs it everything: its scales come from what keys and values
of the loaded model measure over `CALIBRATION_TOKENS` tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.decoder import KVCache
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.parallel.mesh import replicated
from jaxinfer.weights.plan import LeafPath
from jaxinfer.weights.reader import CheckpointError, CheckpointReader
from kernels_pallas.quantized_pages import LARGEST

logger = logging.getLogger(__name__)

SCALE_TENSORS = r".*\blayers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale"
"""Names of a checkpoint's scales: of a whole layer ([] or [1]) or of each kv head ([K], or [K, 1, 1])."""

CALIBRATION_TOKENS = 256
_HEADROOM = 1.25
"""Over the largest number measured; what exceeds it saturates."""
_PAGE_SIZE = 16


def scale_paths(decoder: FunctionalDecoder) -> list[LeafPath]:
    """The decoder's leaves that are scales; none unless its cache has 8 bits."""
    return [path for path in decoder.leaves if path[-1] in ("k_scale", "v_scale")]


def make_scales(
    decoder: FunctionalDecoder, weights: Mapping[LeafPath, jax.Array], reader: CheckpointReader
) -> dict[LeafPath, jax.Array]:
    """Every leaf that `scale_paths` names, given the others.

    Raises `CheckpointError` for scales in the checkpoint that are no positive numbers, or not one or one per kv head.
    """
    paths = scale_paths(decoder)
    if not paths:
        return {}
    if decoder.kv_dtype == jnp.int8:
        values = _measured(decoder, weights)
        logger.info("KV cache scales: measured over %d tokens", CALIBRATION_TOKENS)
    else:
        found = _from_checkpoint(decoder, reader)
        values = {
            path: found.get(path, np.ones(decoder.leaves[path].shape, np.float32)) for path in paths
        }
        logger.info("KV cache scales: %d of %d from the checkpoint", len(found), len(paths))
    return {path: jax.device_put(values[path], decoder.leaves[path].sharding) for path in paths}


def _from_checkpoint(
    decoder: FunctionalDecoder, reader: CheckpointReader
) -> dict[LeafPath, np.ndarray]:
    scales = {}
    for name in reader.names():
        if (match := re.fullmatch(SCALE_TENSORS, name)) is None:
            continue
        attention = decoder.spec.layers[int(match[1])].attention
        num_heads, heads = attention.num_kv_heads, decoder.dims.heads(attention)
        scale = reader.read(name, np.dtype(np.float32)).reshape(-1)
        if scale.size not in (1, num_heads) or not (np.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(
                f"Tensor {name} in {reader.file_of(name)} must hold one positive number, or one for each of "
                f"{num_heads} kv heads; it has shape {reader.shape(name)}, from {scale.min()} to {scale.max()}."
            )
        per_head = np.ones(heads.num_kv_heads, np.float32)
        per_head[: num_heads * heads.kv_replicas] = np.repeat(
            np.broadcast_to(scale, num_heads), heads.kv_replicas
        )
        scales["layers", match[1], "attention", f"{match[2]}_scale"] = per_head
    return scales


def _measured(
    decoder: FunctionalDecoder, weights: Mapping[LeafPath, jax.Array]
) -> dict[LeafPath, jax.Array]:
    """From the keys and values of random tokens, in a cache of the model's dtype."""
    plain = FunctionalDecoder.create(
        decoder.spec,
        decoder.mesh,
        decoder.dtype,
        expert_parallel=decoder.dims.expert_parallel,
        layouts=decoder.layouts,
    )
    num_tokens = min(CALIBRATION_TOKENS, decoder.spec.max_position_embeddings)
    num_pages = -(-num_tokens // _PAGE_SIZE)
    attending = [i for i, layer in enumerate(plain.spec.layers) if layer.attention is not None]
    shapes = plain.kv_cache_shapes(num_pages, _PAGE_SIZE, num_slots=2)
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    token_ids = np.random.default_rng(0).integers(decoder.spec.vocab_size, size=num_tokens)
    batch = RaggedBatch(
        token_ids=jnp.asarray(token_ids, jnp.int32),
        positions=positions,
        slot_mapping=positions,
        query_start_loc=jnp.array([0, num_tokens], jnp.int32),
        seq_lens=jnp.array([num_tokens], jnp.int32),
        block_tables=jnp.arange(num_pages, dtype=jnp.int32)[None],
        decode_only=False,
        state_slots=jnp.array([0], jnp.int32),
    )

    def largest(leaves: list[jax.Array], batch: RaggedBatch) -> tuple[tuple[jax.Array, ...], ...]:
        empty: KVCache = tuple(
            tuple(jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in layer) for layer in shapes
        )
        _, kv_cache = plain.forward(leaves, batch, empty)
        return tuple(
            tuple(jnp.abs(x).max(axis=(0, 2, 3)).astype(jnp.float32) for x in layer)
            for layer in kv_cache[: len(attending)]
        )

    batch = jax.device_put(batch, replicated(decoder.mesh))
    measured = jax.jit(largest)([weights[path] for path in plain.leaves], batch)
    largest_stored = LARGEST[decoder.kv_dtype.name]
    scales = {}
    for i, layer in zip(attending, measured, strict=True):
        for name, largest_h in zip(("k_scale", "v_scale"), layer, strict=True):
            # A head that is all zeros, as padding is, has no scale.
            scale = jnp.where(largest_h > 0, _HEADROOM * largest_h / largest_stored, 1.0)
            scales["layers", str(i), "attention", name] = scale
    return scales
