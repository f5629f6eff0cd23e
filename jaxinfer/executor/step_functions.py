"""What a step computes on the device, as pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.config import LogprobsMode
from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.input_batch import FROM_DEVICE, PackedLayout, table_names
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.executor.logprobs import TokenLogprobs, prompt_logprobs
from jaxinfer.executor.penalties import SamplerArrays
from jaxinfer.executor.sampler import INVALID_TOKEN, sample
from jaxinfer.executor.sampler_features import SamplerFeatures
from jaxinfer.executor.sampling_rows import ACTIVE, ROW
from jaxinfer.models.batch import PageTables, RaggedBatch
from jaxinfer.models.decoder import Head, KVCache
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.lora import AdapterStacks
from kernels_pallas import SharedPrefixes


class ForwardOutput(NamedTuple):
    rows: jax.Array
    """[R, E], the hidden state of each row's last token."""
    tokens: jax.Array
    """[T, E]"""
    kv_cache: KVCache
    streams: tuple[jax.Array, ...] = ()
    """[T, E] each, what entered the layers that were asked for."""


class SampleResult(NamedTuple):
    token_ids: jax.Array
    """[R] int32, `INVALID_TOKEN` where the logits were not finite."""
    logprobs: TokenLogprobs | None
    last_tokens: jax.Array
    """[S + 1] int32, what each row sampled last; entry S is padding's."""
    state: SamplerArrays | None


def forward_step(
    decoder: FunctionalDecoder,
    shape: StepShape,
    leaves: Sequence[jax.Array],
    kv_cache: KVCache,
    last_tokens: jax.Array,
    packed: jax.Array,
    adapters: AdapterStacks | None = None,
    *,
    stream_layers: tuple[int, ...] = (),
    batch_invariant: bool = False,
) -> ForwardOutput:
    """Run the model over the batch in `packed` (see `PackedLayout`); `kv_cache` is donated. The output has the streams
    that enter `stream_layers`."""
    num_groups = len(decoder.groups)
    step = PackedLayout(shape, num_groups, adapters is not None).views(packed)
    # A token that only the device has is its row's only one, and rows of one token come first: token t is row t's.
    row_of_token = jnp.minimum(jnp.arange(shape.num_tokens), shape.num_rows - 1)
    fed = last_tokens[step["rows"]][row_of_token]
    token_ids = jnp.where(step["token_ids"] == FROM_DEVICE, fed, step["token_ids"])
    batch = batch_of(shape, step, token_ids, num_groups, batch_invariant=batch_invariant)
    if decoder.spec.has_states:
        batch = replace(batch, state_slots=step["rows"])
    if adapters is not None:
        batch = replace(batch, adapter_slots=step["adapter_slots"])
    hidden, streams, kv_cache = decoder.forward_with_streams(
        leaves, batch, kv_cache, stream_layers, adapters
    )
    last = jnp.maximum(batch.query_start_loc[1:] - 1, 0)
    return ForwardOutput(hidden[last], hidden, kv_cache, streams)


def batch_of(
    shape: StepShape,
    step: dict[str, jax.Array],
    token_ids: jax.Array,
    num_groups: int = 1,
    *,
    batch_invariant: bool = False,
) -> RaggedBatch:
    """The batch of the unpacked `step`, with the tokens `token_ids` [T]. `num_groups`: of layers, the step's tables."""
    return RaggedBatch(
        token_ids=token_ids,
        positions=step["positions"],
        slot_mapping=step["slot_mapping"],
        query_start_loc=step["query_start_loc"],
        seq_lens=step["seq_lens"],
        block_tables=step["block_tables"],
        decode_only=shape.decode_only,
        batch_invariant=batch_invariant,
        shared_prefixes=_shared_prefixes(step) if shape.num_prefixes else None,
        more_tables=tuple(
            PageTables(*(step[name] for name in table_names(group)))
            for group in range(1, num_groups)
        ),
    )


def _shared_prefixes(step: dict[str, jax.Array]) -> SharedPrefixes:
    return SharedPrefixes(
        block_tables=step["prefix_tables"],
        lens=step["prefix_lens"],
        query_start_loc=step["prefix_start_loc"],
    )


def sample_step(
    decoder: FunctionalDecoder,
    features: SamplerFeatures,
    logprobs_mode: LogprobsMode,
    processors: LogitsProcessors | None,
    head: Head,
    hidden: jax.Array,
    last_tokens: jax.Array,
    state: SamplerArrays | None,
    packed: jax.Array,
    mask_words: jax.Array | None,
    logprob_ids: jax.Array | None,
) -> SampleResult:
    """Sample a token for each row of `hidden` [R, E] with the parameters in `packed` (see `SamplingRows.gather`);
    `last_tokens` and `state` are donated."""
    return sample_logits(
        features,
        logprobs_mode,
        processors,
        decoder.logits(head, hidden),
        last_tokens,
        state,
        packed,
        mask_words,
        logprob_ids,
    )


def sample_logits(
    features: SamplerFeatures,
    logprobs_mode: LogprobsMode,
    processors: LogitsProcessors | None,
    logits: jax.Array,
    last_tokens: jax.Array,
    state: SamplerArrays | None,
    packed: jax.Array,
    mask_words: jax.Array | None,
    logprob_ids: jax.Array | None,
) -> SampleResult:
    """`sample_step` given the logits [R, V]."""
    out, state = sample(
        logits,
        packed,
        state,
        mask_words,
        logprob_ids,
        features=features,
        logprobs_mode=logprobs_mode,
        processors=processors,
    )
    padding = last_tokens.shape[0] - 1
    targets = jnp.where(packed[:, ACTIVE] != 0, packed[:, ROW], padding)
    return SampleResult(
        token_ids=jnp.where(out.invalid, INVALID_TOKEN, out.token_ids),
        logprobs=out.logprobs,
        last_tokens=last_tokens.at[targets].set(out.token_ids),
        state=state,
    )


def score_prompt(
    decoder: FunctionalDecoder,
    num_logprobs: int,
    head: Head,
    hidden: jax.Array,
    target_ids: jax.Array,
) -> TokenLogprobs:
    """Logprobs of the tokens `target_ids` [T] that follow the positions of `hidden` [T, E]."""
    return prompt_logprobs(
        partial(decoder.logits, head),
        hidden,
        target_ids,
        num_logprobs=num_logprobs,
        vocab_size=decoder.spec.vocab_size,
    )
