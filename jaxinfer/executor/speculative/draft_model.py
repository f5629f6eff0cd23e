"""Drafts of a smaller model of the same vocabulary, which sees every batch that the target sees.

Two programs: `extend` runs the step's own batch, so that the draft model's keys and values are there for all of it;
`draft` feeds each row's new token and then draft after draft, all on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.compiler_options import forward_options
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.speculative.draft_choice import DraftChoice, Drawn, joined
from jaxinfer.executor.speculative.draft_rows import DraftRows, one_token_batch
from jaxinfer.executor.speculative.drafter import DraftStep, Proposal
from jaxinfer.executor.speculative.model_drafter import ModelDrafter
from jaxinfer.executor.step_functions import batch_of
from jaxinfer.models.decoder import KVCache
from jaxinfer.models.functional import FunctionalDecoder


def extend_step(
    decoder: FunctionalDecoder,
    shape: StepShape,
    leaves: Sequence[jax.Array],
    kv_cache: KVCache,
    packed: jax.Array,
) -> KVCache:
    """The cache with the keys and values of the step's batch; `kv_cache` is donated."""
    step = PackedLayout(shape).views(packed)
    return decoder.forward(leaves, batch_of(shape, step, step["token_ids"]), kv_cache)[1]


def draft_step(
    decoder: FunctionalDecoder,
    choice: DraftChoice,
    num_drafts: int,
    block_size: int,
    leaves: Sequence[jax.Array],
    kv_cache: KVCache,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    sampling: jax.Array,
) -> tuple[Proposal, KVCache]:
    """Each row's next token and the drafts after it, one at a time; `kv_cache` is donated.

    Args:
        rows: see `DraftRows`.
        sampling: [R, …] as in `DraftStep`.
    """
    draft_rows = DraftRows(*rows)
    first = draft_rows.next_positions
    head = decoder.head(leaves)

    def one(
        carry: tuple[jax.Array, jax.Array, KVCache], _: None
    ) -> tuple[tuple[jax.Array, jax.Array, KVCache], Drawn]:
        token_ids, positions, kv_cache = carry
        batch, has_slot = one_token_batch(draft_rows.lines, token_ids, positions, block_size)
        hidden, kv_cache = decoder.forward(leaves, batch, kv_cache)
        drawn = choice.draw(decoder.logits(head, hidden), sampling, positions + 1, has_slot)
        return (drawn.token_ids, positions + 1, kv_cache), drawn

    carry = (draft_rows.next_tokens, first, kv_cache)
    (_, _, kv_cache), drawn = jax.lax.scan(one, carry, length=num_drafts)
    return joined(drawn), kv_cache


class DraftModel(ModelDrafter[FunctionalDecoder]):
    def _extend(self, step: DraftStep, packed: jax.Array, lines: jax.Array) -> None:
        program = self._extend_program(step.shape)
        self.kv_cache = program(self.leaves, self.kv_cache, packed)

    def _draft(self, step: DraftStep, lines: jax.Array, extended: object) -> Proposal:
        rows = (lines, step.last_tokens, step.num_accepted)
        program = self._draft_program(step.shape)
        proposal, self.kv_cache = program(self.leaves, self.kv_cache, rows, step.sampling)
        return proposal

    def lower_extend(self, shape: StepShape) -> jax.stages.Lowered:
        return jax.jit(
            partial(extend_step, self.module, shape),
            donate_argnums=1,
            compiler_options=forward_options(self.setting.mesh),
        ).lower(
            list(self.module.leaves.values()), self._abstract_cache(), self._abstract_packed(shape)
        )

    def lower_draft(self, num_rows: int, num_pages: int) -> jax.stages.Lowered:
        setting = self.setting
        return jax.jit(
            partial(
                draft_step, self.module, setting.choice, setting.num_drafts, setting.block_size
            ),
            donate_argnums=1,
            compiler_options=forward_options(setting.mesh),
        ).lower(
            list(self.module.leaves.values()),
            self._abstract_cache(),
            self._abstract_rows(num_rows, num_pages),
            self._abstract_sampling(num_rows),
        )
