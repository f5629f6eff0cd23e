"""What a runner has to do with its drafter: hand it each step, and remember what drafts were drawn with."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxinfer.executor.speculative.drafter import DraftStep
from jaxinfer.executor.speculative.model_drafter import Job, ModelDrafter
from jaxinfer.parallel.mesh import replicated


class Drafting:
    def __init__(self, drafter: ModelDrafter, vocab_size: int) -> None:
        """`vocab_size`: the target's."""
        self.drafter = drafter
        self._vocab_size = vocab_size
        self._drawn: tuple[np.ndarray, jax.Array] | None = None

    def draft(self, step: DraftStep) -> jax.Array | None:
        """Launch the drafting after a step: [R, K] as in `Proposal`, None where no drafts are wanted."""
        proposal, self._drawn = self.drafter.propose(step), None
        if proposal is None:
            return None
        if proposal.probs is not None:
            self._drawn = step.plan.rows, proposal.probs
        proposal.token_ids.copy_to_host_async()
        return proposal.token_ids

    def probs(self, rows: np.ndarray, num_before: np.ndarray) -> jax.Array | None:
        """What the last step's drafts were drawn with, if they were: [N, V] for the next draft of `rows`, padded to N,
        after their first `num_before` [N]. Anything where there is no next one."""
        if self._drawn is None:
            return None
        drawn_rows, probs = self._drawn
        places = np.zeros(self.drafter.setting.num_rows, np.int32)
        places[drawn_rows] = np.arange(len(drawn_rows))
        index = np.zeros(len(num_before), np.int32)
        index[: len(rows)] = places[rows]
        program = self.drafter.setting.cache.get(*self._take_job(len(probs), len(num_before)))
        return program(probs, index, num_before)

    def jobs(self) -> Iterator[Job]:
        """Every program that a step can ask for."""
        yield from self.drafter.jobs()
        if self.drafter.setting.choice.random:
            ladder = self.drafter.setting.ladder
            for num_rows in {shape.num_rows for shape in ladder.all_shapes()}:
                for num_positions in ladder.all_positions():
                    yield self._take_job(num_rows, num_positions)

    def _take_job(self, num_rows: int, num_positions: int) -> Job:
        setting = self.drafter.setting

        def compile_it() -> jax.stages.Compiled:
            everywhere = replicated(setting.mesh)
            shape = (num_rows, setting.num_drafts, self._vocab_size)
            probs = jax.ShapeDtypeStruct(shape, np.float32, sharding=everywhere)
            index = jax.ShapeDtypeStruct((num_positions,), np.int32, sharding=everywhere)
            return jax.jit(_take).lower(probs, index, index).compile()

        return ("take_probs", num_rows, num_positions), compile_it


def _take(probs: jax.Array, rows: jax.Array, num_before: jax.Array) -> jax.Array:
    return probs.at[rows, num_before].get(mode="clip")
