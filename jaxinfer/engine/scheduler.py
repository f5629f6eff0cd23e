"""What the next step computes, and what its tokens mean for the requests.

One token of each sampling row in flight counts as a placeholder, so that a step can be planned before the tokens of
the one before it are known; whatever turns out superfluous is dropped when it comes back. In steady decoding both
`schedule` and `update` are arithmetic over the row table's arrays; Python loops see only requests that arrive, end,
are preempted or asked for something special.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.adapters import AdapterReader, Adapters
from jaxinfer.engine.admission_order import AdmissionOrder, CacheAwareOrder, QueueOrder
from jaxinfer.engine.admission_room import AdmissionRoom
from jaxinfer.engine.block_hash import BlockKey
from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.kv_cache_manager import KVCacheManager, TableEntries
from jaxinfer.engine.messages import Admission, EngineCoreOutputs, EngineCoreRequest
from jaxinfer.engine.plan import (
    AdmittedRow,
    ForcedTokens,
    Int32,
    PrefixGroups,
    StepPlan,
    StepResult,
)
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.prefix_groups import PrefixGrouping
from jaxinfer.engine.request import Request, RequestState
from jaxinfer.engine.request_queue import create_request_queue
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, ScheduledStep
from jaxinfer.engine.speculation import Speculation
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.engine.step_outputs import StepUpdate


class Scheduler:
    """Running requests first, in the order of admission, then waiting ones. See `jaxinfer.config.SchedulerConfig`
    for the limits; `num_blocks` counts the padding block. `reader` is what reads adapters, where the
    engine has any."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, reader: AdapterReader | None = None
    ) -> None:
        self._model = config.model
        self._config = config.scheduler
        num_rows = config.scheduler.max_num_seqs
        self.table = RowTable(num_rows, config.model.vocab_size)
        self.kv = KVCacheManager(
            num_blocks,
            config.cache.block_size,
            num_rows,
            config.max_blocks_per_seq,
            config.cache.windows,
        )
        self._demand = CacheDemand.of(config)
        self.prefix_cache = PrefixCache(config.cache, self.kv, self.table)
        self.prefix_grouping = PrefixGrouping(config.cascade, self.kv, self.table)
        self.speculation: Speculation | None = None
        if config.speculative is not None:
            self.speculation = Speculation(config.speculative, config, self.table)
        self.adapters = Adapters(config.lora, reader, config.scheduler.max_overtakes)
        self.refused: list[tuple[Request, str]] = []
        """Waiting requests that have turned out not to be servable, and why; whoever takes them out ends them."""
        self.waiting = create_request_queue(config.scheduler.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_preemptions = 0
        self._running_batch: Batch | None = None
        self._forced: dict[int, ForcedTokens] = {}

    def add_request(self, message: EngineCoreRequest) -> Request:
        """A request with a grammar waits for `start` before it queues. Raises `ValueError` for an adapter that can't be
        read."""
        adapter = None if message.lora is None else self.adapters.key_of(message.lora)
        request = Request(message, self._model, self._num_arrived, adapter)
        self.adapters.expect(request)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        if request.state is RequestState.WAITING:
            self.waiting.add(request)
        return request

    def start(self, requests: Iterable[Request]) -> None:
        """Queue requests whose grammars are compiled, each where its arrival puts it."""
        for request in requests:
            request.state = RequestState.WAITING
            self.waiting.put_back(request)

    def finish(self, requests: Iterable[Request]) -> None:
        """End requests in whatever state they are. Their rows and blocks can be handed out at once: the device runs
        the steps in order, so those in flight are through with them before the next one begins."""
        ended = {r for r in requests if r.state is not RequestState.FINISHED}
        running = {r for r in ended if r.state is RequestState.RUNNING}
        if waiting := ended - running:
            self.waiting.remove(waiting)
        if running:
            self._release(running)
        for request in ended:
            request.state = RequestState.FINISHED
            del self.requests[request.request_id]
            self.adapters.forget(request)
        if running:
            self._keep_running()

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when there is nothing to compute (until results in flight come back)."""
        preemptions_before = self._num_preemptions
        self._free_fallen()
        computed, counts, missing = self._fit_running()
        batch = self._batch()
        rows = batch.rows
        if self.speculation is not None:
            drafts = self.speculation.choose(batch, computed, counts, self.kv)
            missing = np.maximum(self.kv.missing(rows, computed + counts + drafts), 0)
        entries = [self.kv.grow(rows, missing)]
        longest = counts.max(initial=0)
        # Before anybody is admitted: newcomers may share what the running requests compute in this step.
        may_admit = len(self.waiting) and self.table.num_free
        self.prefix_cache.register(rows, computed, counts if longest > 1 or may_admit else None)
        admitted: list[Request] = []
        if len(self.waiting) and self._num_preemptions == preemptions_before:
            admitted, counts = self._admit(counts, entries)
            longest = counts.max(initial=0)
        batch = self._batch()
        if not counts.all():
            index = np.flatnonzero(counts)
            batch, counts = batch.take(index), counts[index]
        if not counts.size:
            return None
        scheduled = counts
        if self.speculation is not None:
            self.speculation.look_ahead(batch, counts, self.kv, entries)
            scheduled = counts + self.speculation.num_drafts[batch.rows]
            longest = scheduled.max()
        groups = None
        if longest > 1:
            # Rows with one token first: the device may treat them as decodes.
            index = np.argsort(scheduled != 1, kind="stable")
            batch, counts = batch.take(index), counts[index]
        else:
            batch, groups = self.prefix_grouping.arrange(batch)
        return self._plan(batch, counts, groups, TableEntries.join(entries), admitted)

    def force(self, step: ScheduledStep, tokens: dict[int, Int32]) -> None:
        """Let the rows at these positions of a step that is being sampled go on with the tokens that their grammars
        force: the first one is being sampled, those after it need no sampling."""
        table = self.table
        for position, forced in tokens.items():
            row = int(step.batch.rows[position])
            start = int(table.num_tokens[row]) - 1
            table.num_tokens[row] += len(forced) - 1
            step.forced[position] = forced[1:]
            self._forced[row] = ForcedTokens(row, start, forced)

    def update(self, step: ScheduledStep, result: StepResult) -> EngineCoreOutputs:
        """Append the step's tokens and end the requests that they complete."""
        update = StepUpdate(self.table, step, result)
        if update.ended:
            self.finish(update.ended)
        if self.speculation is not None:
            self.speculation.update(step, result)
        update.outputs.stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.requests) - len(self.running),
            kv_cache_usage=self.kv.pool.usage,
            num_scheduled_tokens=step.plan.num_tokens,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self.prefix_cache.num_queries,
            prefix_cache_hits=self.prefix_cache.num_hits,
            spec_decode=update.spec_decode,
            num_deferred=len(self.requests) - len(self.running) - len(self.waiting),
            running_adapters=self.adapters.running,
            waiting_adapters=self.adapters.waiting,
        )
        self._num_preemptions = 0
        self.prefix_cache.num_queries = self.prefix_cache.num_hits = 0
        return update.outputs

    def _batch(self) -> Batch:
        """The running requests; the same object as long as they stay the same."""
        if self._running_batch is None:
            self._running_batch = Batch.of(self.running, self.table)
        return self._running_batch

    def _keep_running(self) -> None:
        self.running = [r for r in self.running if r.state is RequestState.RUNNING]
        self._running_batch = None

    def _free_fallen(self) -> None:
        """Give back what fell out of windows. Steps in flight may still read it: the device is through with them before
        it begins the one that is being planned, the first that may write there."""
        if not self.kv.has_windows:
            return
        rows = self._batch().rows
        rows = self.kv.fallen(rows, self.table.num_computed[rows])
        if rows.size:
            computed = self.table.num_computed[rows]
            self.prefix_cache.register_fallen(rows, computed)
            self.kv.free_fallen(rows, computed)

    def _fit_running(self) -> tuple[Int32, Int32, Int32]:
        """How many tokens of each running request are computed, how many it computes next and how many blocks it lacks
        for them, after preempting as many as it takes for the blocks to suffice."""
        num_groups = self.kv.num_groups
        while True:
            rows = self._batch().rows
            computed = self.table.num_computed[rows]
            counts = self._tokens_to_compute(rows, computed)
            missing = np.maximum(self.kv.missing(rows, computed + counts), 0)
            short = int(missing.sum()) * num_groups - self.kv.pool.num_free
            if short <= 0:
                return computed, counts, missing
            wanted = dict(zip(rows.tolist(), (missing * num_groups).tolist(), strict=True))
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
        """Send a running request back to the queue, to be computed anew. Returns the number of blocks that became free."""
        freed = self._release([request])
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(request)
        self._keep_running()
        return freed

    def _release(self, requests: Collection[Request]) -> int:
        """Take rows and blocks away. Returns the number of blocks that became free."""
        self.prefix_cache.release(requests)
        self.prefix_grouping.release([request.row for request in requests])
        num_free = self.kv.pool.num_free
        for request in requests:
            self._forced.pop(request.row, None)
            self.kv.free(request.row)
            self.table.release(request)
            self.adapters.leave(request)
        return self.kv.pool.num_free - num_free

    def _admit(self, counts: Int32, entries: list[TableEntries]) -> tuple[list[Request], Int32]:
        """Let waiting requests run as long as rows, budget and blocks last; `counts` and `entries` grow by theirs.

        A request enters only when the blocks for all its known tokens are free beyond what running requests need for
        theirs, or chunks of several long prompts would fill the cache and preempt one another. One whose next block
        another request is about to compute lets those behind it pass until it can share that block.
        """
        table, kv, cache, config = self.table, self.kv, self.prefix_cache, self._config
        budget = config.max_num_batched_tokens - int(counts.sum())
        if self.speculation is not None:
            budget -= int(self.speculation.num_drafts.sum())
        admitted: list[Request] = []
        if budget <= 0 or not table.num_free:
            return admitted, counts
        batch = self._batch()
        room = AdmissionRoom(kv, self._demand, batch.rows, table.num_tokens[batch.rows])
        unfinished = table.num_computed[batch.rows] + counts < table.num_tokens[batch.rows]
        coming: set[BlockKey] = set()
        for i in np.flatnonzero(unfinished).tolist():
            coming.update(cache.coming(batch.requests[i]))
        self.adapters.begin_step()
        order = self._admission_order()
        new_counts = []
        while budget > 0 and table.num_free and (request := order.next()) is not None:
            if request.num_in_flight:
                break
            if not self.adapters.may_enter(request):
                continue
            found = cache.find(request)
            if cache.waits_for(request, found.num_blocks, coming):
                continue
            if not self._adapter_is_there(request):
                order.take(request)
                continue
            num_tokens = request.num_known_tokens
            if not room.take(found, num_tokens):
                break
            order.take(request)
            self.adapters.enter(request)
            request.num_cached_tokens = num_cached = found.num_blocks * kv.block_size
            count = num_tokens - num_cached
            count = min(count, budget, config.long_prefill_token_threshold or count)
            budget -= count
            row = table.admit(request, num_cached)
            entries.append(kv.start(row, found, num_cached + count))
            cache.admit(request, found.num_blocks, num_cached + count)
            self.prefix_grouping.admit(row, found.num_blocks)
            coming.update(cache.coming(request))
            request.state = RequestState.RUNNING
            admitted.append(request)
            new_counts.append(count)
        order.close()
        if admitted:
            self.running += admitted
            self._running_batch = None
            counts = np.concatenate([counts, np.array(new_counts, np.int32)])
        return admitted, counts

    def _adapter_is_there(self, request: Request) -> bool:
        try:
            self.adapters.prepare(request)
        except ValueError as error:
            self.refused.append((request, str(error)))
            return False
        return True

    def _admission_order(self) -> AdmissionOrder:
        if not self._config.cache_aware or len(self.waiting) == 1:
            return QueueOrder(self.waiting)
        return CacheAwareOrder(
            self.waiting,
            lambda request: self.prefix_cache.find(request).num_blocks,
            self._config.max_overtakes,
        )

    def _plan(
        self,
        batch: Batch,
        counts: Int32,
        groups: PrefixGroups | None,
        entries: TableEntries,
        admitted: list[Request],
    ) -> ScheduledStep:
        table, rows = self.table, batch.rows
        computed = table.num_computed[rows]
        num_tokens = table.num_tokens[rows]
        ends = computed + counts
        samples = ends == num_tokens
        drafts = None
        if self.speculation is not None:
            # Until they are verified, the table knows nothing of the guesses.
            drafts = self.speculation.plan(batch, computed, samples)
            counts = counts + drafts.num_drafts
        table.num_computed[rows] = ends
        table.num_tokens[rows] = num_tokens + samples
        plan = StepPlan(
            admitted=[
                AdmittedRow(
                    r.row,
                    r.known_token_ids,
                    len(r.prompt_token_ids),
                    r.sampling_params,
                    r.adapter_slot,
                    r.pooling,
                )
                for r in admitted
            ],
            rows=rows,
            num_scheduled=counts,
            num_computed=computed,
            samples=samples,
            block_rows=entries.rows,
            block_cols=entries.cols,
            block_ids=entries.blocks,
            forced=list(self._forced.values()),
            prefix_groups=groups,
            drafts=drafts,
            adapters=self.adapters.take_loads(),
        )
        self._forced = {}
        now = time.monotonic() if admitted else 0.0
        return ScheduledStep(
            plan=plan,
            batch=batch,
            all_sample=bool(samples.all()),
            first_scheduled=[
                Admission(r.request_id, now, r.num_cached_tokens)
                for r in admitted
                if not r.num_preemptions
            ],
        )
