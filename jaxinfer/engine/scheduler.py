"""What the next step computes, and what its tokens mean for the requests.

One token of each sampling row in flight counts as a placeholder, so that a step can be planned before the tokens of
the one before it are known; whatever turns out superfluous is dropped when it comes back. In steady decoding both
`schedule` and `update` are arithmetic over the row table's arrays; Python loops see only requests that arrive, end,
are preempted or asked for something special.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestTimes,
)
from jaxinfer.engine.plan import AdmittedRow, Int32, StepPlan, StepResult
from jaxinfer.engine.request import Request, RequestState
from jaxinfer.engine.request_queue import create_request_queue
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, ScheduledStep
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.engine.step_outputs import StepUpdate


class Scheduler:
    """Running requests first, in the order of admission, then waiting ones. See `jaxinfer.config.SchedulerConfig`
    for the limits; `num_blocks` counts the padding block."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._model = config.model
        self._config = config.scheduler
        num_rows = config.scheduler.max_num_seqs
        self.table = RowTable(num_rows, config.model.vocab_size)
        self.kv = KVCacheManager(
            num_blocks, config.cache.block_size, num_rows, config.max_blocks_per_seq
        )
        self.waiting = create_request_queue(config.scheduler.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_preemptions = 0
        self._running_batch: Batch | None = None

    def add_request(self, message: EngineCoreRequest) -> None:
        request = Request(message, self._model, self._num_arrived)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish(self, requests: Iterable[Request]) -> None:
        """End requests in whatever state they are. Their rows and blocks can be handed out at once: the device runs
        the steps in order, so those in flight are through with them before the next one begins."""
        ended = {r for r in requests if r.state is not RequestState.FINISHED}
        waiting = {r for r in ended if r.state is not RequestState.RUNNING}
        if waiting:
            self.waiting.remove(waiting)
        for request in ended - waiting:
            self.kv.free(request.row)
            self.table.release(request)
        for request in ended:
            request.state = RequestState.FINISHED
            del self.requests[request.request_id]
        if len(ended) > len(waiting):
            self._keep_running()

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when there is nothing to compute (until results in flight come back)."""
        preemptions_before = self._num_preemptions
        counts, missing = self._fit_running()
        admitted: list[Request] = []
        if len(self.waiting) and self._num_preemptions == preemptions_before:
            admitted, counts, missing = self._admit(counts, missing)
        batch = self._batch()
        if not counts.all():
            index = np.flatnonzero(counts)
            batch, counts, missing = batch.take(index), counts[index], missing[index]
        if not counts.size:
            return None
        if counts.max() > 1:
            # Rows with one token first: the device may treat them as decodes.
            index = np.argsort(counts != 1, kind="stable")
            batch, counts, missing = batch.take(index), counts[index], missing[index]
        return self._plan(batch, counts, missing, admitted)

    def update(self, step: ScheduledStep, result: StepResult) -> EngineCoreOutputs:
        """Append the step's tokens and end the requests that they complete."""
        update = StepUpdate(self.table, step, result)
        if update.ended:
            self.finish(update.ended)
        update.outputs.stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.pool.usage,
            num_scheduled_tokens=step.plan.num_tokens,
            num_preemptions=self._num_preemptions,
        )
        self._num_preemptions = 0
        return update.outputs

    def _batch(self) -> Batch:
        """The running requests; the same object as long as they stay the same."""
        if self._running_batch is None:
            self._running_batch = Batch.of(self.running, self.table)
        return self._running_batch

    def _keep_running(self) -> None:
        self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        self._running_batch = None

    def _fit_running(self) -> tuple[Int32, Int32]:
        """How many tokens each running request computes and how many blocks it lacks for them, after preempting as
        many as it takes for the blocks to suffice."""
        while True:
            rows = self._batch().rows
            computed = self.table.num_computed[rows]
            counts = self._tokens_to_compute(rows, computed)
            missing = np.maximum(self.kv.missing(rows, computed + counts), 0)
            short = int(missing.sum()) - self.kv.pool.num_free
            if short <= 0:
                return counts, missing
            wanted = dict(zip(rows.tolist(), missing.tolist(), strict=True))
            while short > 0:
                victim = self.waiting.victim(self.running)
                if len(self.running) == 1:
                    raise RuntimeError(
                        f"Request {victim.request_id!r} runs alone and still lacks {short} KV-cache blocks."
                    )
                short -= wanted[victim.row] + self._preempt(victim)

    def _tokens_to_compute(self, rows: Int32, computed: Int32) -> Int32:
        """Per row, within the threshold and the step's budget. A request's last token needs no computing."""
        table, config = self.table, self._config
        counts = np.minimum(table.num_tokens[rows], table.max_total[rows] - 1) - computed
        if config.long_prefill_token_threshold > 0:
            np.minimum(counts, config.long_prefill_token_threshold, out=counts)
        if counts.sum() > config.max_num_batched_tokens:
            before = np.cumsum(counts) - counts
            left = config.max_num_batched_tokens - before
            counts = np.clip(left, 0, counts).astype(np.int32)
        return counts

    def _preempt(self, request: Request) -> int:
        """Send a running request back to the queue, to be computed anew. Returns the number of blocks it held."""
        freed = self.kv.free(request.row)
        self.table.release(request)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(request)
        self._keep_running()
        return freed

    def _admit(self, counts: Int32, missing: Int32) -> tuple[list[Request], Int32, Int32]:
        """Let waiting requests run as long as rows, budget and blocks last; `counts` and `missing` grow by theirs.

        A request enters only when the blocks for all its known tokens are free beyond what running requests need for
        theirs, or chunks of several long prompts would fill the cache and preempt one another.
        """
        table, kv, config = self.table, self.kv, self._config
        budget = config.max_num_batched_tokens - int(counts.sum())
        rows = self._batch().rows
        reserved = np.maximum(kv.missing(rows, table.num_tokens[rows]), 0)
        free_blocks = kv.pool.num_free - int(reserved.sum())
        admitted: list[Request] = []
        new_counts = []
        while len(self.waiting) and budget > 0 and table.num_free:
            request = self.waiting.peek()
            num_tokens = request.num_known_tokens
            free_blocks -= -(-num_tokens // kv.block_size)
            if free_blocks < 0 or request.num_in_flight:
                break
            self.waiting.pop()
            count = min(num_tokens, budget, config.long_prefill_token_threshold or num_tokens)
            budget -= count
            table.admit(request)
            request.state = RequestState.RUNNING
            admitted.append(request)
            new_counts.append(count)
        if admitted:
            self.running += admitted
            self._running_batch = None
            new = np.array(new_counts, np.int32)
            counts = np.concatenate([counts, new])
            missing = np.concatenate([missing, kv.blocks_for(new)])
        return admitted, counts, missing

    def _plan(
        self, batch: Batch, counts: Int32, missing: Int32, admitted: list[Request]
    ) -> ScheduledStep:
        table, rows = self.table, batch.rows
        computed = table.num_computed[rows]
        num_tokens = table.num_tokens[rows]
        ends = computed + counts
        samples = ends == num_tokens
        table.num_computed[rows] = ends
        table.num_tokens[rows] = num_tokens + samples
        block_rows, block_cols, block_ids = self.kv.grow(rows, missing)
        plan = StepPlan(
            admitted=[
                AdmittedRow(r.row, r.known_token_ids, len(r.prompt_token_ids), r.sampling_params)
                for r in admitted
            ],
            rows=rows,
            num_scheduled=counts,
            num_computed=computed,
            samples=samples,
            block_rows=block_rows,
            block_cols=block_cols,
            block_ids=block_ids,
        )
        now = time.monotonic() if admitted else 0.0
        return ScheduledStep(
            plan=plan,
            batch=batch,
            all_sample=bool(samples.all()),
            first_scheduled=[
                RequestTimes(r.request_id, now) for r in admitted if not r.num_preemptions
            ],
        )
