"""The programs of steps with drafts, as pure functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.config import LogprobsMode
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.executor.logprobs import TokenLogprobs
from jaxinfer.executor.penalties import SamplerArrays
from jaxinfer.executor.sampler import INVALID_TOKEN, sample
from jaxinfer.executor.sampler_features import SamplerFeatures
from jaxinfer.executor.sampling_rows import ACTIVE, ROW
from jaxinfer.executor.speculative.verification import DraftedPositions
from jaxinfer.models.decoder import Head
from jaxinfer.models.functional import FunctionalDecoder


class VerifyResult(NamedTuple):
    token_ids: jax.Array
    """[N] int32, what was sampled at each position, `INVALID_TOKEN` where the logits were not finite."""
    logprobs: TokenLogprobs | None
    last_tokens: jax.Array
    """[S + 1] int32, see `SampleResult`."""
    num_accepted: jax.Array
    """[S + 1] int32, how many drafts of each row held."""
    state: SamplerArrays | None


def verify_step(
    decoder: FunctionalDecoder,
    features: SamplerFeatures,
    logprobs_mode: LogprobsMode,
    processors: LogitsProcessors | None,
    num_drafts: int,
    head: Head,
    hidden: jax.Array,
    last_tokens: jax.Array,
    state: SamplerArrays | None,
    packed: jax.Array,
    mask_words: jax.Array | None,
    logprob_ids: jax.Array | None,
    drafted: DraftedPositions,
) -> VerifyResult:
    """Sample at the N positions of a step whose rows have up to `num_drafts` drafts, given the hidden states [N, E]
    there and the rows' parameters once per position. `last_tokens` and `state` are donated."""
    logits = decoder.logits(head, hidden)
    out, state = sample(
        logits,
        packed,
        state,
        mask_words,
        logprob_ids,
        features=features,
        logprobs_mode=logprobs_mode,
        processors=processors,
        drafted=drafted,
        num_drafts=num_drafts,
    )
    assert out.is_last is not None
    padding = last_tokens.shape[0] - 1
    targets = jnp.where((packed[:, ACTIVE] != 0) & out.is_last, packed[:, ROW], padding)
    return VerifyResult(
        token_ids=jnp.where(out.invalid, INVALID_TOKEN, out.token_ids),
        logprobs=out.logprobs,
        last_tokens=last_tokens.at[targets].set(out.token_ids),
        num_accepted=jnp.zeros_like(last_tokens).at[targets].set(drafted.num_before),
        state=state,
    )


def take_positions(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """[T, E] at `index` [N]: [N, E]."""
    return hidden[index]
