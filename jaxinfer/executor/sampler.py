"""From logits to tokens on the device, in the order that vLLM documents.

Logprobs come from the raw logits. Then: token mask (allowed ids, bad words, min_tokens and grammars arrive as one),
logit_bias, penalties; greedy rows take the argmax of that. For the others: temperature, min-p, top-k, top-p, draw.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.executor import sampling_rows as columns
from jaxinfer.executor.categorical import draw, uniform_pair
from jaxinfer.executor.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.executor.penalties import (
    SamplerArrays,
    apply_logit_bias,
    apply_penalties,
    count_tokens,
)
from jaxinfer.executor.sampler_features import SamplerFeatures, SamplerLevel
from jaxinfer.executor.token_filter import token_filter


class SampleOutput(NamedTuple):
    """`invalid[r]`: the logits of row r hold a NaN or +inf, or leave no token to choose; its token is arbitrary."""

    token_ids: jax.Array  # [R] int32
    invalid: jax.Array  # [R] bool
    logprobs: TokenLogprobs | None


def sample(
    logits: jax.Array,
    packed: jax.Array,
    state: SamplerArrays | None,
    mask_words: jax.Array | None,
    *,
    features: SamplerFeatures,
) -> tuple[SampleOutput, SamplerArrays | None]:
    """Choose a token for each row. To be called inside a jitted program that donates `state`.

    Args:
        logits: [R, V] float32.
        packed: [R, NUM_COLUMNS] int32 from `SamplingRows.gather`.
        state: needed when `features.level` is FULL, else None; the updated one is returned.
        mask_words: [R, ceil(V / 32)] uint32 when `features.masked`, else None.
    """
    raw = logits
    full = features.level is SamplerLevel.FULL
    row, active = packed[:, columns.ROW], packed[:, columns.ACTIVE] != 0
    if mask_words is not None:
        logits = _mask(logits, mask_words)
    if full:
        assert state is not None
        logits = apply_logit_bias(logits, row, state.bias_ids, state.bias_values)
        logits = apply_penalties(
            logits,
            state.tokens.at[row].get(mode="clip"),
            _floats(packed, columns.REPETITION),
            _floats(packed, columns.FREQUENCY),
            _floats(packed, columns.PRESENCE),
        )
    # One materialised array, so that every comparison below sees the same bits.
    logits = lax.optimization_barrier(logits)
    peak = jnp.max(logits, axis=1)
    token_ids = _first_equal(logits, peak)
    if features.level >= SamplerLevel.RANDOM:
        token_ids = _sample_random(logits, peak, token_ids, packed)
    if full:
        state = state._replace(tokens=count_tokens(state.tokens, row, token_ids, active))
    scored = None
    if features.num_logprobs is not None:
        scored = token_logprobs(raw, token_ids, features.num_logprobs)
    return SampleOutput(token_ids, ~jnp.isfinite(peak), scored), state


def _sample_random(
    logits: jax.Array, peak: jax.Array, greedy: jax.Array, packed: jax.Array
) -> jax.Array:
    temperature = _floats(packed, columns.TEMPERATURE)
    random = temperature > 0
    temperature = jnp.where(random, temperature, 1.0)
    # Greedy rows ask for no filter, whatever their parameters say.
    kept = token_filter(
        logits,
        peak,
        temperature,
        jnp.where(random, packed[:, columns.TOP_K], 0),
        jnp.where(random, _floats(packed, columns.TOP_P), 1.0),
        jnp.where(random, _floats(packed, columns.MIN_P), 0.0),
    )

    def weights(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.where(
            kept.keeps(x, index), jnp.exp((x - peak[:, None]) / temperature[:, None]), 0
        )

    u = uniform_pair(
        packed[:, columns.SEED_HIGH], packed[:, columns.SEED_LOW], packed[:, columns.POSITION]
    )
    drawn = draw(weights, logits, u)
    return jnp.where(random & (drawn < logits.shape[1]), drawn, greedy)


def _mask(logits: jax.Array, words: jax.Array) -> jax.Array:
    """-inf where the bit is unset; a NaN stays, to be reported."""
    R, V = logits.shape
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(R, -1)[:, :V] != 0
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


def _first_equal(logits: jax.Array, peak: jax.Array) -> jax.Array:
    """The argmax, given the maximum: XLA's own argmax takes ten times longer on CPU. 0 for a row with NaN."""
    V = logits.shape[1]
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.min(jnp.where(logits == peak[:, None], index, V), axis=1)
    return jnp.where(first < V, first, 0)


def _floats(packed: jax.Array, column: int) -> jax.Array:
    return lax.bitcast_convert_type(packed[:, column], jnp.float32)
