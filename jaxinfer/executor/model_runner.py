"""Runs the steps that the engine core plans: launches the device programs and hands back their tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.engine.plan import LogprobArrays, StepPlan, StepResult, TokenMask
from jaxinfer.executor.adapters import DeviceAdapters
from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.input_batch import InputBatch, PackedLayout
from jaxinfer.executor.logprobs import TokenLogprobs
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.sampler import INVALID_TOKEN
from jaxinfer.executor.sampler_features import SamplerFeatures
from jaxinfer.executor.sampling_rows import NUM_COLUMNS, SamplingRows
from jaxinfer.executor.speculative.drafter import DraftStep
from jaxinfer.executor.speculative.drafting import Drafting
from jaxinfer.executor.speculative.verification import (
    NO_DRAFT,
    DraftedPositions,
    StepPositions,
)
from jaxinfer.executor.step_functions import ForwardOutput
from jaxinfer.models.decoder import Head, KVCache

logger = logging.getLogger(__name__)


@dataclass
class LaunchedStep:
    """A step on its way through the device. `result` waits for it; see `plan.StepHandle`."""

    num_rows: int
    token_ids: jax.Array | None
    logprobs: TokenLogprobs | None
    prompt_scores: TokenLogprobs | None
    prompt_spans: dict[int, slice]
    """Which of the scored tokens belong to which of the plan's rows."""
    positions: StepPositions | None = None
    """With drafts: where `token_ids` and `logprobs` were sampled; else they are by row."""
    draft_token_ids: jax.Array | None = None

    def result(self) -> StepResult:
        if self.token_ids is None:
            token_ids = np.zeros(self.num_rows, np.int32)
        else:
            token_ids = np.asarray(self.token_ids)[: self.num_rows]
        logprobs = None if self.logprobs is None else logprob_arrays(self.logprobs)
        invalid, num_tokens = token_ids == INVALID_TOKEN, None
        if self.positions is not None:
            token_ids = np.asarray(self.token_ids)[: len(self.positions.rows)]
            invalid = token_ids[self.positions.starts] == INVALID_TOKEN
            num_tokens = self.positions.num_emitted(token_ids, INVALID_TOKEN)
            kept = self.positions.num_before < num_tokens[self.positions.rows]
            token_ids = token_ids[kept]
            if logprobs is not None:
                kept = np.flatnonzero(kept)
                logprobs = LogprobArrays(
                    logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept]
                )
        prompt_logprobs = {}
        if self.prompt_scores is not None:
            scores = logprob_arrays(self.prompt_scores)
            for r, span in self.prompt_spans.items():
                prompt_logprobs[r] = LogprobArrays(
                    scores.token_ids[span], scores.logprobs[span], scores.ranks[span]
                )
        return StepResult(
            token_ids=token_ids,
            invalid=invalid,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_tokens=num_tokens,
            draft_token_ids=None
            if self.draft_token_ids is None
            else np.asarray(self.draft_token_ids)[: self.num_rows],
        )


class SampledPositions(NamedTuple):
    """N places where a token is sampled, `padded` by the program to so many: their rows, the sequence positions that
    the tokens take, and whether one is wanted; see `SamplingRows.gather`."""

    rows: np.ndarray
    positions: np.ndarray
    samples: np.ndarray
    padded: int


@dataclass
class ModelRunner:
    """The device state of an engine (weights, cache, last tokens) and its mirror of the scheduler's rows."""

    programs: Programs
    leaves: list[jax.Array]
    kv_cache: KVCache
    last_tokens: jax.Array
    batch: InputBatch
    sampling_rows: SamplingRows
    drafting: Drafting | None = None
    adapters: DeviceAdapters | None = None
    _pending: LaunchedForward | None = field(default=None, init=False)

    def execute_model(self, plan: StepPlan) -> None:
        self._take_over(plan)
        self._pending = self._launch(plan)

    def _take_over(self, plan: StepPlan) -> None:
        """Bring the mirror of the scheduler's rows, and the slots of adapters, up to the plan."""
        for load in plan.adapters:
            assert self.adapters is not None, "the plan has adapters, the engine none"
            self.adapters.fill(load.slot, load.key)
        for admitted in plan.admitted:
            self.sampling_rows.set_row(
                admitted.row,
                admitted.sampling_params,
                admitted.token_ids,
                admitted.num_prompt_tokens,
            )
        self.batch.apply(plan)

    def _launch(self, plan: StepPlan) -> LaunchedForward:
        shape, packed = self.batch.pack(plan)
        stacks = None if self.adapters is None else self.adapters.stacks
        out = self.programs.forward(shape)(
            self.leaves, self.kv_cache, self.last_tokens, packed, stacks
        )
        self.kv_cache = out.kv_cache
        return LaunchedForward(plan, shape, packed, out)

    def sample_tokens(self, mask: TokenMask | None) -> LaunchedStep:
        forward, self._pending = self._pending, None
        assert forward is not None, "sample_tokens needs an execute_model before it"
        plan, shape = forward.plan, forward.shape
        scores, spans = self._score_prompts(forward)
        launched = LaunchedStep(len(plan.rows), None, None, scores, spans)
        features = self.sampling_rows.features(plan.rows, plan.samples, masked=mask is not None)
        num_accepted = None
        if plan.drafts is not None and len(plan.drafts.token_ids):
            assert features is not None, "drafts are for rows that sample"
            num_accepted = self._verify(forward, features, mask, launched)
        elif features is not None:
            out = self._run_sampler(
                self.programs.sample(shape.num_rows, features),
                features,
                (self._head, forward.out.rows),
                SampledPositions(
                    plan.rows,
                    plan.num_computed + plan.num_scheduled,
                    plan.samples,
                    shape.num_rows,
                ),
                mask,
            )
            launched.token_ids, launched.logprobs = out.token_ids, out.logprobs
        for array in jax.tree.leaves((launched.token_ids, launched.logprobs)):
            array.copy_to_host_async()
        if self.drafting is not None:
            launched.draft_token_ids = self._draft(forward, num_accepted)
        return launched

    def _verify(
        self,
        forward: LaunchedForward,
        features: SamplerFeatures,
        mask: TokenMask | None,
        launched: LaunchedStep,
    ) -> jax.Array:
        """Launch the sampling of a step with drafts, at the positions after each row's last token and its drafts.
        Returns how many of them hold, see `DraftStep.num_accepted`."""
        plan = forward.plan
        assert plan.drafts is not None
        positions = launched.positions = StepPositions.of(plan.drafts)
        N = self.programs.ladder.positions(len(positions.rows))
        # Drafts come last in what a row computes.
        ends = np.cumsum(plan.num_scheduled)
        index = (ends - positions.counts)[positions.rows] + positions.num_before
        hidden = forward.out.tokens
        if plan.num_tokens > len(index):
            take = self.programs.take_positions(forward.shape.num_tokens, N)
            hidden = take(hidden, _padded(index.astype(np.int32), N))
        if mask is not None:
            places = positions.starts[mask.positions]
            if mask.num_before is not None:
                places = places + mask.num_before
            mask = TokenMask(places.astype(np.int32), mask.words)
        num_before = _padded(positions.num_before.astype(np.int32), N)
        sampled = plan.num_computed + plan.num_scheduled - plan.drafts.num_drafts
        rows = plan.rows[positions.rows]
        out = self._run_sampler(
            self.programs.verify(N, features),
            features,
            (self._head, hidden),
            SampledPositions(
                rows,
                sampled[positions.rows] + positions.num_before,
                plan.samples[positions.rows],
                N,
            ),
            mask,
            DraftedPositions(
                _padded(positions.next_drafts, N, NO_DRAFT),
                num_before,
                None if self.drafting is None else self.drafting.probs(rows, num_before),
            ),
        )
        launched.token_ids, launched.logprobs = out.token_ids, out.logprobs
        return out.num_accepted

    def _run_sampler(
        self,
        program: jax.stages.Compiled,
        features: SamplerFeatures,
        inputs: tuple[jax.Array, ...],
        at: SampledPositions,
        mask: TokenMask | None,
        *more: DraftedPositions,
    ) -> Any:
        """Launch a sampling program, of the variant `features`, on `inputs`, and take over what it returns of this
        runner's state. `mask` names entries of `at`."""
        state, rows = self.programs.sampler_state, self.sampling_rows
        if features.stateful:
            state.update(rows)
        out = program(
            *inputs,
            self.last_tokens,
            state.arrays if features.stateful else None,
            rows.gather(*at),
            rows.mask_words(mask, at.padded) if features.masked else None,
            rows.logprob_ids(at.rows, features.num_logprobs, at.padded),
            *more,
        )
        self.last_tokens = out.last_tokens
        if features.stateful:
            state.arrays = out.state
        return out

    def _draft(self, forward: LaunchedForward, num_accepted: jax.Array | None) -> jax.Array | None:
        """Launch the drafting after a step; `num_accepted` as `_verify` returns it, None for a step without drafts."""
        plan, shape, packed, out = forward
        assert self.drafting is not None and plan.drafts is not None
        positions = plan.num_computed + plan.num_scheduled - plan.drafts.num_drafts
        step = DraftStep(
            plan=plan,
            shape=shape,
            # Drafters have no adapters.
            packed=packed[: PackedLayout(shape).size],
            hidden=out.tokens,
            embed=self.programs.decoder.embedding(self.leaves),
            aux_hidden=out.streams,
            last_tokens=self.last_tokens,
            num_accepted=np.zeros(len(self.last_tokens), np.int32)
            if num_accepted is None
            else num_accepted,
            sampling=self.sampling_rows.gather(plan.rows, positions, plan.samples, shape.num_rows)[
                :, :NUM_COLUMNS
            ],
        )
        return self.drafting.draft(step)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program that a step can need."""
        self.programs.warm_up(progress)
        if self.drafting is not None:
            self.programs.cache.compile_all(self.drafting.jobs(), progress)
        self.programs.sampler_state.compile_updates()
        if self.adapters is not None:
            self.adapters.warm_up()

    @property
    def _head(self) -> Head:
        return self.programs.decoder.head(self.leaves)

    def _score_prompts(
        self, forward: LaunchedForward
    ) -> tuple[TokenLogprobs | None, dict[int, slice]]:
        """Launch the logprobs of the prompt tokens that follow this step's positions, where a row asked."""
        asked = self.sampling_rows.num_prompt_logprobs[forward.plan.rows]
        if (asked < 0).all():
            return None, {}
        targets, spans = self._prompt_targets(forward, asked >= 0)
        if not spans:
            return None, {}
        rung = self.sampling_rows.logprobs_rung(asked.max())
        program = self.programs.score_prompt(forward.shape.num_tokens, rung)
        scores = program(self._head, forward.out.tokens, targets)
        for array in scores:
            array.copy_to_host_async()
        return scores, spans

    def _prompt_targets(
        self, forward: LaunchedForward, wanted: np.ndarray
    ) -> tuple[np.ndarray, dict[int, slice]]:
        """The prompt tokens [T] that follow the step's positions in the `wanted` [R] rows, and where those of each of
        these rows are."""
        plan = forward.plan
        targets = np.zeros(forward.shape.num_tokens, np.int32)
        spans: dict[int, slice] = {}
        starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
        for r in np.flatnonzero(wanted):
            row = self.batch.admitted[plan.rows[r]]
            first = int(plan.num_computed[r]) + 1
            last = min(first + int(plan.num_scheduled[r]), row.num_prompt_tokens)
            if last > first:
                spans[int(r)] = span = slice(starts[r], starts[r] + last - first)
                targets[span] = row.token_ids[first:last]
        return targets, spans


class LaunchedForward(NamedTuple):
    """A forward pass that has been launched and waits for its sampling."""

    plan: StepPlan
    shape: StepShape
    packed: np.ndarray
    out: ForwardOutput


def _padded(values: np.ndarray, length: int, padding: int = 0) -> np.ndarray:
    return np.pad(values, (0, length - len(values)), constant_values=padding)


def logprob_arrays(scores: TokenLogprobs) -> LogprobArrays:
    return LogprobArrays(*(np.asarray(array) for array in scores))
