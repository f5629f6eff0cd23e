"""Drafts of an EAGLE-3 layer: it continues what the target's layers made of the tokens so far.

Two programs: `extend` runs the layer over the step's batch, each position with the token after it, and so has what the
first draft is read from; `draft` feeds drafts and the layer's own hidden states back, all on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.compiler_options import forward_options
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.speculative.draft_choice import DraftChoice, Drawn, joined
from jaxinfer.executor.speculative.draft_rows import DraftRows, one_token_batch
from jaxinfer.executor.speculative.drafter import DraftStep, Proposal
from jaxinfer.executor.speculative.model_drafter import ModelDrafter
from jaxinfer.executor.step_functions import batch_of
from jaxinfer.models.attention import KVPages
from jaxinfer.models.drafters.eagle3 import FunctionalEagle3
from jaxinfer.models.stored_weight import StoredWeight

Extended = tuple[jax.Array, jax.Array]
"""Of each row's last token that stays, [R, E] both: what the head takes, and what the next position takes."""


def extend_step(
    model: FunctionalEagle3,
    shape: StepShape,
    leaves: Sequence[jax.Array],
    kv_cache: tuple[KVPages],
    embed: jax.Array | StoredWeight,
    packed: jax.Array,
    streams: tuple[jax.Array, ...],
    rows: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[Extended, tuple[KVPages]]:
    """Run the layer over the step's batch; `kv_cache` is donated. What follows rejected drafts is garbage that nobody
    reads: these positions are computed again before a later one attends to them.

    Args:
        embed: the target's embedding.
        streams: [T, target_dim] each.
        rows: see `DraftRows`.
    """
    step, draft_rows = PackedLayout(shape).views(packed), DraftRows(*rows)
    last = draft_rows.hidden_index
    following = jnp.roll(step["token_ids"], -1)
    following = following.at[last].set(draft_rows.next_tokens, mode="drop")
    layer = model.module.bind(leaves)
    batch = batch_of(shape, step, following)
    hidden, stream, kv_pages = layer(embed, layer.fuse(streams), kv_cache[0], batch)
    at_last = tuple(x.at[last].get(mode="clip") for x in (hidden, stream))
    return at_last, (kv_pages,)


def draft_step(
    model: FunctionalEagle3,
    choice: DraftChoice,
    num_drafts: int,
    block_size: int,
    leaves: Sequence[jax.Array],
    kv_cache: tuple[KVPages],
    embed: jax.Array | StoredWeight,
    extended: Extended,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    sampling: jax.Array,
) -> tuple[Proposal, tuple[KVPages]]:
    """The first draft from what `extend_step` left, the others one at a time; `kv_cache` is donated."""
    layer, draft_rows = model.module.bind(leaves), DraftRows(*rows)
    target_ids = layer.target_ids()
    position = draft_rows.next_positions

    def draw(hidden: jax.Array, position: jax.Array, possible: jax.Array) -> Drawn:
        logits = layer.compute_logits(hidden)
        drawn = choice.draw(logits, sampling, position, possible)
        return drawn.mapped(target_ids, model.spec.target_vocab_size)

    def one(
        carry: tuple[jax.Array, jax.Array, jax.Array, KVPages], _: None
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array, KVPages], Drawn]:
        token_ids, stream, position, kv_pages = carry
        batch, has_slot = one_token_batch(draft_rows.lines, token_ids, position, block_size)
        hidden, stream, kv_pages = layer(embed, stream, kv_pages, batch)
        drawn = draw(hidden, position + 2, has_slot)
        return (drawn.token_ids, stream, position + 1, kv_pages), drawn

    hidden, stream = extended
    first = draw(hidden, position + 1, draft_rows.active)
    carry = (first.token_ids, stream, position, kv_cache[0])
    (_, _, _, kv_pages), later = jax.lax.scan(one, carry, length=num_drafts - 1)
    drawn = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, later)
    return joined(drawn), (kv_pages,)


class Eagle3Drafter(ModelDrafter[FunctionalEagle3]):
    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.module.spec.stream_layers

    def _extend(self, step: DraftStep, packed: jax.Array, lines: jax.Array) -> Extended:
        extended, self.kv_cache = self._extend_program(step.shape)(
            self.leaves,
            self.kv_cache,
            step.embed,
            packed,
            step.aux_hidden,
            (lines, step.last_tokens, step.num_accepted),
        )
        return extended

    def _draft(self, step: DraftStep, lines: jax.Array, extended: object) -> Proposal:
        proposal, self.kv_cache = self._draft_program(step.shape)(
            self.leaves,
            self.kv_cache,
            step.embed,
            extended,
            (lines, step.last_tokens, step.num_accepted),
            step.sampling,
        )
        return proposal

    def lower_extend(self, shape: StepShape) -> jax.stages.Lowered:
        spec = self.module.spec
        stream = self._array((shape.num_tokens, spec.target_dim), self.module.dtype)
        return jax.jit(
            partial(extend_step, self.module, shape),
            donate_argnums=1,
            compiler_options=forward_options(self.setting.mesh),
        ).lower(
            list(self.module.leaves.values()),
            self._abstract_cache(),
            self.setting.target_embed,
            self._abstract_packed(shape),
            (stream,) * len(spec.stream_layers),
            self._abstract_rows(shape.num_rows, shape.num_pages),
        )

    def lower_draft(self, num_rows: int, num_pages: int) -> jax.stages.Lowered:
        setting = self.setting
        hidden = self._array((num_rows, self.module.spec.layer.embed_dim), self.module.dtype)
        return jax.jit(
            partial(
                draft_step, self.module, setting.choice, setting.num_drafts, setting.block_size
            ),
            donate_argnums=1,
            compiler_options=forward_options(setting.mesh),
        ).lower(
            list(self.module.leaves.values()),
            self._abstract_cache(),
            setting.target_embed,
            (hidden, hidden),
            self._abstract_rows(num_rows, num_pages),
            self._abstract_sampling(num_rows),
        )
