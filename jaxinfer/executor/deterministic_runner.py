"""Runs a step in tiles of one shape: what a token meets is the same program, whatever the step holds besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.engine.plan import LogprobArrays, StepPlan, StepResult, TokenMask
from jaxinfer.executor.deterministic_programs import DeterministicPrograms
from jaxinfer.executor.logprobs import TokenLogprobs
from jaxinfer.executor.model_runner import (
    LaunchedForward,
    ModelRunner,
    SampledPositions,
    logprob_arrays,
)
from jaxinfer.executor.sampler import INVALID_TOKEN
from jaxinfer.executor.step_tiles import StepTile, cut_into_tiles


class _Sampled(NamedTuple):
    """What one launch sampled: entry `of[i]` of the results is for the plan's row `rows[i]`."""

    rows: np.ndarray
    of: np.ndarray
    token_ids: jax.Array
    logprobs: TokenLogprobs | None


class _Scored(NamedTuple):
    """Prompt logprobs of one launch, and which of its positions belong to which of the plan's rows."""

    scores: TokenLogprobs
    spans: dict[int, slice]


@dataclass
class LaunchedTiles:
    """A step on its way through the device; see `plan.StepHandle`."""

    num_rows: int
    sampled: list[_Sampled] = field(default_factory=list)
    scored: list[_Scored] = field(default_factory=list)

    def result(self) -> StepResult:
        token_ids = np.zeros(self.num_rows, np.int32)
        for part in self.sampled:
            token_ids[part.rows] = np.asarray(part.token_ids)[part.of]
        return StepResult(
            token_ids=token_ids,
            invalid=token_ids == INVALID_TOKEN,
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _logprobs(self) -> LogprobArrays | None:
        """Of all rows; columns beyond what a row asked for hold anything."""
        parts = [(p, logprob_arrays(p.logprobs)) for p in self.sampled if p.logprobs is not None]
        if not parts:
            return None
        shape = self.num_rows, max(arrays.token_ids.shape[1] for _, arrays in parts)
        whole = LogprobArrays(
            np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[0], np.int32)
        )
        for part, arrays in parts:
            columns = arrays.token_ids.shape[1]
            whole.token_ids[part.rows, :columns] = arrays.token_ids[part.of]
            whole.logprobs[part.rows, :columns] = arrays.logprobs[part.of]
            whole.ranks[part.rows] = arrays.ranks[part.of]
        return whole

    def _prompt_logprobs(self) -> dict[int, LogprobArrays]:
        parts: dict[int, list[LogprobArrays]] = {}
        for scores, spans in self.scored:
            arrays = logprob_arrays(scores)
            for row, span in spans.items():
                parts.setdefault(row, []).append(
                    LogprobArrays(arrays.token_ids[span], arrays.logprobs[span], arrays.ranks[span])
                )
        return {row: _joined(arrays) for row, arrays in parts.items()}


def _joined(parts: list[LogprobArrays]) -> LogprobArrays:
    return LogprobArrays(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


@dataclass
class DeterministicRunner(ModelRunner):
    """A `ModelRunner` whose steps are cut into tiles, and whose rows each take the sampler's variant that they would
    take alone."""

    programs: DeterministicPrograms
    _tiles: list[tuple[StepTile, LaunchedForward]] = field(default_factory=list, init=False)
    _num_rows: int = field(default=0, init=False)

    def execute_model(self, plan: StepPlan) -> None:
        self._take_over(plan)
        self._num_rows = len(plan.rows)
        self._tiles = [
            (tile, self._launch(tile.plan)) for tile in cut_into_tiles(plan, self.programs.tile)
        ]

    def sample_tokens(self, mask: TokenMask | None) -> LaunchedTiles:
        step = LaunchedTiles(self._num_rows)
        place = np.full(self._num_rows, -1)
        if mask is not None:
            place[mask.positions] = np.arange(len(mask.positions))
        for tile, forward in self._tiles:
            self._score(step, tile, forward)
            if tile.plan.samples.any():
                self._sample(step, tile, forward, mask, place[tile.index])
        self._tiles = []
        for array in jax.tree.leaves([part[2:] for part in step.sampled]):
            array.copy_to_host_async()
        return step

    def _sample(
        self,
        step: LaunchedTiles,
        tile: StepTile,
        forward: LaunchedForward,
        mask: TokenMask | None,
        place: np.ndarray,
    ) -> None:
        """`place` [R]: the tile's rows in the mask, -1 for those that it doesn't name."""
        plan, num_rows = tile.plan, self.programs.tile
        logits = self.programs.logits()(self._head, forward.out.rows)
        positions = plan.num_computed + plan.num_scheduled
        masked = place >= 0
        for features, members in self.sampling_rows.feature_groups(plan.rows, plan.samples, masked):
            own = None
            if mask is not None:
                named = np.flatnonzero(members & masked)
                own = TokenMask(named.astype(np.int32), mask.words[place[named]])
            out = self._run_sampler(
                self.programs.sample(num_rows, features),
                features,
                (logits,),
                SampledPositions(plan.rows, positions, members, num_rows),
                own,
            )
            of = np.flatnonzero(members)
            step.sampled.append(_Sampled(tile.index[of], of, out.token_ids, out.logprobs))

    def _score(self, step: LaunchedTiles, tile: StepTile, forward: LaunchedForward) -> None:
        """Launch the logprobs of the prompt tokens that follow the tile's positions, where a row asked."""
        asked = self.sampling_rows.num_prompt_logprobs[tile.plan.rows]
        if (asked < 0).all():
            return
        logits = None
        rungs = np.array([self.sampling_rows.logprobs_rung(n) or 0 for n in asked])
        for rung in np.unique(rungs[asked >= 0]).tolist():
            targets, spans = self._prompt_targets(forward, (asked >= 0) & (rungs == rung))
            if not spans:
                continue
            if logits is None:
                logits = self.programs.logits()(self._head, forward.out.tokens)
            scores = self.programs.score_prompt(self.programs.tile, rung)(logits, targets)
            for array in scores:
                array.copy_to_host_async()
            own = {int(tile.index[r]): span for r, span in spans.items()}
            step.scored.append(_Scored(scores, own))
