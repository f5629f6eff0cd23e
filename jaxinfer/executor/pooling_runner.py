"""Runs the steps of a decoder that makes vectors: prompts in chunks like any other's, and at their end no token."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from jaxinfer.engine.messages import Pooling
from jaxinfer.engine.plan import StepPlan, StepResult, TokenMask
from jaxinfer.executor.model_runner import LaunchedForward, ModelRunner
from jaxinfer.executor.pooling_programs import ClassHead, PoolingPrograms


@dataclass
class LaunchedPooling:
    """See `plan.StepHandle`. `chunks` are those of the prompts whose every token counts, by row: they are added to here, in
    the order of the steps."""

    plan: StepPlan
    tasks: list[Pooling]
    vectors: jax.Array | None
    tokens: jax.Array | None
    chunks: dict[int, list[np.ndarray]]

    def result(self) -> StepResult:
        plan, num_rows = self.plan, len(self.plan.rows)
        pooled: dict[int, np.ndarray] = {}
        invalid = np.zeros(num_rows, np.bool_)
        vectors = None if self.vectors is None else np.asarray(self.vectors)
        tokens = None if self.tokens is None else np.asarray(self.tokens)
        ends = np.cumsum(plan.num_scheduled)
        for r in range(num_rows):
            if self.tasks[r].task in ("embed", "classify"):
                found = None if vectors is None else vectors[r]
            else:
                assert tokens is not None
                row = int(plan.rows[r])
                if plan.num_computed[r] == 0:
                    self.chunks[row] = []
                chunk = tokens[ends[r] - plan.num_scheduled[r] : ends[r]]
                self.chunks[row].append(chunk.astype(np.float32))
                found = np.concatenate(self.chunks.pop(row)) if plan.samples[r] else None
            if plan.samples[r] and found is not None:
                invalid[r] = not np.isfinite(found).all()
                pooled[r] = found
        return StepResult(np.zeros(num_rows, np.int32), invalid, pooled=pooled)


@dataclass
class PoolingRunner(ModelRunner):
    class_head: ClassHead = ()
    _tasks: dict[int, Pooling] = field(default_factory=dict, init=False)
    _chunks: dict[int, list[np.ndarray]] = field(default_factory=dict, init=False)
    _sums: jax.Array | None = field(default=None, init=False)

    def _take_over(self, plan: StepPlan) -> None:
        super()._take_over(plan)
        for admitted in plan.admitted:
            assert admitted.pooling is not None
            self._tasks[admitted.row] = admitted.pooling

    def sample_tokens(self, mask: TokenMask | None) -> LaunchedPooling:  # type: ignore[override]
        forward, self._pending = self._pending, None
        assert forward is not None, "sample_tokens needs an execute_model before it"
        plan = forward.plan
        tasks = [self._tasks[row] for row in plan.rows.tolist()]
        kinds = {pooling.task for pooling in tasks}
        vectors = tokens = None
        if kinds & {"embed", "classify"}:
            vectors = self._pool(forward)
            vectors.copy_to_host_async()
        if kinds & {"token_embed", "token_classify"}:
            tokens = forward.out.tokens
            if self.class_head:
                program = self._pooling_programs.classify_tokens(forward.shape.num_tokens)
                tokens = program(self.class_head, tokens)
            tokens.copy_to_host_async()
        return LaunchedPooling(plan, tasks, vectors, tokens, self._chunks)

    @property
    def _pooling_programs(self) -> PoolingPrograms:
        assert isinstance(self.programs, PoolingPrograms)
        return self.programs

    def _pool(self, forward: LaunchedForward) -> jax.Array:
        programs, shape, out = self._pooling_programs, forward.shape, forward.out
        if self._sums is None:
            sums = programs.sums_shape
            self._sums = jax.device_put(np.zeros(sums.shape, sums.dtype), sums.sharding)
        pooled = programs.pool(shape)(
            self.class_head, out.tokens, out.rows, self._sums, forward.packed
        )
        self._sums = pooled.sums
        return pooled.vectors
