"""From logits to tokens on the device, in the order that vLLM documents.

Logprobs come from the raw logits unless the engine is told otherwise (`LogprobsMode`). Then: token mask (allowed ids, bad words, min_tokens and
grammars arrive as one), logit_bias, penalties, custom processors; greedy rows take the argmax of that. For the others:
temperature, min-p, top-k, top-p, draw.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.config import LogprobsMode
from jaxinfer.executor import sampling_rows as columns
from jaxinfer.executor.categorical import draw, uniform_pair
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.executor.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.executor.penalties import (
    SamplerArrays,
    apply_logit_bias,
    apply_penalties,
    count_tokens,
)
from jaxinfer.executor.sampler_features import SamplerFeatures, SamplerLevel
from jaxinfer.executor.speculative.rejection import sample_given_drafts, uniforms
from jaxinfer.executor.speculative.verification import (
    DraftedPositions,
    count_emitted,
    emitted,
    with_drafts,
)
from jaxinfer.executor.token_filter import BLOCK, TokenFilter, block_maxima, token_filter

INVALID_TOKEN = -1
"""Stands in a step's token ids for a row whose logits can't be trusted."""


class SampleOutput(NamedTuple):
    """`invalid[r]`: the logits of row r hold a NaN or +inf, or leave no token to choose; its token
    is arbitrary."""

    token_ids: jax.Array  # [R] int32
    invalid: jax.Array  # [R] bool
    logprobs: TokenLogprobs | None
    is_last: jax.Array | None  # [R] bool, with drafts: the token is output, and its row's last one


def sample(
    logits: jax.Array,
    packed: jax.Array,
    state: SamplerArrays | None,
    mask_words: jax.Array | None,
    logprob_ids: jax.Array | None = None,
    *,
    features: SamplerFeatures,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    processors: LogitsProcessors | None = None,
    drafted: DraftedPositions | None = None,
    num_drafts: int = 0,
) -> tuple[SampleOutput, SamplerArrays | None]:
    """Choose a token for each row. To be called inside a jitted program that donates `state`.

    With `drafted`, the rows here are positions, up to `num_drafts` + 1 of each row of the engine (see
    `speculative.verification`).

    Args:
        logits: [R, V] float32.
        packed: [R, NUM_COLUMNS] int32 from `SamplingRows.gather`.
        state: needed when `features.level` is FULL, else None; the updated one is returned.
        mask_words: [R, ceil(V / 32)] uint32 when `features.masked`, else None.
        logprob_ids: from `SamplingRows.logprob_ids`, when `features.num_logprobs` is not None.
    """
    V = logits.shape[1]
    full = features.level is SamplerLevel.FULL
    row, active = packed[:, columns.ROW], packed[:, columns.ACTIVE] != 0
    x = logits
    if mask_words is not None:
        x = _mask(x, mask_words)
    if full:
        assert state is not None
        x = apply_logit_bias(x, row, state.bias_ids, state.bias_values)
        token_states = state.tokens.at[row].get(mode="clip")
        if drafted is not None:
            token_states = with_drafts(token_states, drafted, num_drafts)
        x = apply_penalties(
            x,
            token_states,
            _floats(packed, columns.REPETITION),
            _floats(packed, columns.FREQUENCY),
            _floats(packed, columns.PRESENCE),
        )
        if features.processors:
            assert processors is not None
            x = processors.apply(x, packed, token_states)
    if V % BLOCK:
        x = jnp.pad(x, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    # One materialised array, so that every comparison below sees the same bits.
    x = lax.optimization_barrier(x)
    maxima = block_maxima(x)
    token_ids = argmax(x, maxima)
    if features.level >= SamplerLevel.RANDOM:
        greedy = token_ids
        token_ids = lax.cond(
            jnp.any(_floats(packed, columns.TEMPERATURE) > 0),
            lambda: (
                _sample_random(x, maxima, greedy, packed)
                if drafted is None or drafted.probs is None
                else _verify_drawn(x, maxima, greedy, packed, drafted.next_drafts, drafted.probs)
            ),
            lambda: greedy,
        )
    is_last = None
    if drafted is not None:
        out, is_last = emitted(token_ids, _invalid(maxima), drafted, num_drafts)
    if full:
        if drafted is None:
            tokens = count_tokens(state.tokens, row, token_ids, active)
        else:
            tokens = count_emitted(state.tokens, row, token_ids, active & out, num_drafts)
        state = state._replace(tokens=tokens)
    scored = None
    if features.num_logprobs is not None:
        if logprobs_mode.startswith("processed"):
            logits = _processed(x, maxima, packed)[:, :V]
        normalized = logprobs_mode.endswith("logprobs")
        scored = token_logprobs(
            logits, token_ids, features.num_logprobs, normalized=normalized, given=logprob_ids
        )
    return SampleOutput(token_ids, _invalid(maxima), scored, is_last), state


def _invalid(maxima: jax.Array) -> jax.Array:
    return ~jnp.isfinite(jnp.max(maxima, axis=1))


def _sample_random(
    logits: jax.Array, maxima: jax.Array, greedy: jax.Array, packed: jax.Array
) -> jax.Array:
    random, temperature, kept = row_filter(logits, maxima, packed)
    peak = jnp.max(maxima, axis=1)[:, None]

    def weights_of(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.where(kept.keeps(x, index), jnp.exp((x - peak) / temperature[:, None]), 0)

    seed = packed[:, columns.SEED_HIGH], packed[:, columns.SEED_LOW]
    drawn = draw(weights_of, logits, uniform_pair(*seed, packed[:, columns.POSITION]))
    return jnp.where(random & (drawn < logits.shape[1]), drawn, greedy)


def _verify_drawn(
    logits: jax.Array,
    maxima: jax.Array,
    greedy: jax.Array,
    packed: jax.Array,
    drafts: jax.Array,
    probs: jax.Array,
) -> jax.Array:
    """As `_sample_random`, where the next token's draft was drawn from `probs`; see `speculative.rejection`."""
    V = logits.shape[1]
    seed = packed[:, columns.SEED_HIGH], packed[:, columns.SEED_LOW]
    drawn = sample_given_drafts(
        _processed(logits, maxima, packed),
        jnp.pad(probs, ((0, 0), (0, V - probs.shape[1]))),
        drafts,
        uniforms(*seed, packed[:, columns.POSITION]),
    )
    random = _floats(packed, columns.TEMPERATURE) > 0
    return jnp.where(random & (drawn < V), drawn, greedy)


def row_filter(
    logits: jax.Array, maxima: jax.Array, packed: jax.Array
) -> tuple[jax.Array, jax.Array, TokenFilter]:
    """Which rows are random, by what to divide their logits (1 for others), and the tokens that are left."""
    temperature = _floats(packed, columns.TEMPERATURE)
    random = temperature > 0
    temperature = jnp.where(random, temperature, 1.0)
    # Greedy rows ask for no filter, whatever their parameters say.
    kept = token_filter(
        logits,
        maxima,
        temperature,
        jnp.where(random, packed[:, columns.TOP_K], 0),
        jnp.where(random, _floats(packed, columns.TOP_P), 1.0),
        jnp.where(random, _floats(packed, columns.MIN_P), 0.0),
    )
    return random, temperature, kept


def _processed(logits: jax.Array, maxima: jax.Array, packed: jax.Array) -> jax.Array:
    """Logits of the distribution that random rows are drawn from, and that greedy ones take the largest of."""
    _, temperature, kept = row_filter(logits, maxima, packed)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(kept.keeps(logits, index), logits / temperature[:, None], -jnp.inf)


def argmax(logits: jax.Array, maxima: jax.Array) -> jax.Array:
    """The first largest token [R] of `logits` [R, V] by its block's maximum: XLA's own argmax takes
    50 times longer on CPU (27 ms for 64 x 49,152). Arbitrary for a row with a NaN."""
    block = _first_equal(maxima, jnp.max(maxima, axis=1))
    members = logits.reshape(*maxima.shape, BLOCK)
    members = jnp.take_along_axis(members, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_equal(members, jnp.max(members, axis=1))


def _first_equal(x: jax.Array, value: jax.Array) -> jax.Array:
    """The first index [R] at which `x` [R, N] equals `value` [R]; N - 1 where it never does."""
    N = x.shape[1]
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == value[:, None], index, N - 1), axis=1)


def _mask(logits: jax.Array, words: jax.Array) -> jax.Array:
    """-inf where the bit is unset; a NaN stays, to be reported."""
    R, V = logits.shape
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(R, -1)[:, :V] != 0
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


def _floats(packed: jax.Array, column: int) -> jax.Array:
    return lax.bitcast_convert_type(packed[:, column], jnp.float32)
