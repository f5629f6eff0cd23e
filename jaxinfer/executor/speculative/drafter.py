"""What a model that drafts tokens is given in each step, and what it answers with."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.engine.plan import StepPlan
from jaxinfer.executor.buckets import StepShape
from jaxinfer.models.stored_weight import StoredWeight


class DraftStep(NamedTuple):
    """A step whose forward pass and sampling have been launched. T, R: the rungs of `shape`; S: all rows of the
    engine, entry S of an array by row being padding's."""

    plan: StepPlan
    """Its `drafts` say how many drafts each row has verified, and whether new ones are wanted."""
    shape: StepShape
    packed: np.ndarray
    """The inputs, laid out by `PackedLayout(shape)`. All token ids are there: speculation leaves none to the device."""
    hidden: jax.Array
    """[T, E], after the target's final norm."""
    embed: jax.Array | StoredWeight
    """The target's embedding, [V, E]."""
    aux_hidden: tuple[jax.Array, ...]
    """[T, E] each, of `ModelDrafter.aux_layers`."""
    last_tokens: jax.Array
    """[S + 1] int32 by row: the last token that the step emitted, which nobody has computed yet. Rows that don't sample
    keep what was there. Donated to the next step's sampling: read it in programs that are launched before."""
    num_accepted: jax.Array
    """[S + 1] int32 by row: how many of its drafts were accepted. The hidden state that belongs to `last_tokens` is that
    of the row's token `num_scheduled - 1 - num_drafts + num_accepted`, counted from its first one in this step."""
    sampling: np.ndarray
    """[R, NUM_COLUMNS], the rows' sampling parameters as `SamplingRows.gather` packs them; POSITION is that of the first
    token that the step samples, ACTIVE whether the row samples at all."""


class Proposal(NamedTuple):
    token_ids: jax.Array
    """[R, K] int32, -1 from where a row has no drafts on."""
    probs: jax.Array | None
    """[R, K, V] float32, what the drafts were drawn with; None where each is the drafter's most likely token."""
