"""Drafts of Medusa's heads: all at once, from the target's hidden state of each row's last token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.speculative.draft_choice import DraftChoice, joined
from jaxinfer.executor.speculative.draft_rows import DraftRows
from jaxinfer.executor.speculative.drafter import DraftStep, Proposal
from jaxinfer.executor.speculative.model_drafter import ModelDrafter
from jaxinfer.models.drafters.medusa import FunctionalMedusa


def extend_step(hidden: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """[T, E] -> [R, E], the hidden state of each row's last token that stays. `rows`: see `DraftRows`."""
    return hidden.at[DraftRows(*rows).hidden_index].get(mode="clip")


def draft_step(
    model: FunctionalMedusa,
    choice: DraftChoice,
    leaves: Sequence[jax.Array],
    hidden: jax.Array,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    sampling: jax.Array,
) -> Proposal:
    """The most likely (or a drawn) token of each head, given `hidden` [R, E]."""
    draft_rows = DraftRows(*rows)
    first, active = draft_rows.next_positions + 1, draft_rows.active
    drawn = [
        choice.draw(logits, sampling, first + k, active)
        for k, logits in enumerate(model.module.bind(leaves)(hidden))
    ]
    return joined(jax.tree.map(lambda *x: jnp.stack(x), *drawn))


class MedusaDrafter(ModelDrafter[FunctionalMedusa]):
    def _extend(self, step: DraftStep, packed: jax.Array, lines: jax.Array) -> jax.Array:
        rows = (lines, step.last_tokens, step.num_accepted)
        return self._extend_program(step.shape)(step.hidden, rows)

    def _draft(self, step: DraftStep, lines: jax.Array, extended: object) -> Proposal:
        rows = (lines, step.last_tokens, step.num_accepted)
        return self._draft_program(step.shape)(self.leaves, extended, rows, step.sampling)

    def lower_extend(self, shape: StepShape) -> jax.stages.Lowered:
        return jax.jit(extend_step).lower(
            self._abstract_hidden(shape.num_tokens),
            self._abstract_rows(shape.num_rows, shape.num_pages),
        )

    def lower_draft(self, num_rows: int, num_pages: int) -> jax.stages.Lowered:
        return jax.jit(partial(draft_step, self.module, self.setting.choice)).lower(
            list(self.module.leaves.values()),
            self._abstract_hidden(num_rows),
            self._abstract_rows(num_rows, num_pages),
            self._abstract_sampling(num_rows),
        )

    def _abstract_hidden(self, size: int) -> jax.ShapeDtypeStruct:
        return self._array((size, self.module.spec.embed_dim), self.module.dtype)
