"""A device that costs nothing and trusts nobody: a slot of its KV cache holds a hash of all tokens up to it, of the row's
adapter and of the group of layers, as keys and values depend on all of them, and every plan is checked against what the executor may rely
on."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinfer.config import (
    EngineConfig,
)
from jaxinfer.engine.plan import (
    MAX_PREFIX_GROUPS,
    LogprobArrays,
    StepPlan,
    StepResult,
    TokenMask,
)
from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from tests.engine.fake_requests import NextToken, hashed_token

STEP_COSTS = StepCosts(
    token_flops=1000.0,
    logits_flops=100.0,
    pair_flops=10.0,
    weight_bytes=5000.0,
    kv_bytes=16.0,
    windows=((None, 2),),
    peak_flops=1e6,
    peak_bandwidth=1e6,
)


@dataclass
class DeviceRow:
    """`prefixes[i]` is the hash of `tokens[: i + 1]`. `blocks[c]` are the blocks of column c, one per group; those of the
    first `shared` columns are not the row's to write."""

    generation: int
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    computed: int | None = None
    shared: int = 0
    adapter_slot: int = 0
    adapter: str = ""
    admitted: int = 0
    """Tokens that the executor was told at the row's admission, or since as forced ones."""

    def append(self, token: int) -> None:
        before = self.prefixes[-1] if self.prefixes else zlib.crc32(self.adapter.encode())
        self.tokens.append(token)
        self.prefixes.append(zlib.crc32(token.to_bytes(4, "little"), before))

    def extended(self, tokens: Sequence[int]) -> list[int]:
        """`prefixes` as they would go on with these tokens."""
        prefixes = list(self.prefixes)
        for token in tokens:
            prefixes.append(zlib.crc32(token.to_bytes(4, "little"), prefixes[-1]))
        return prefixes


def _drafts(plan: StepPlan) -> list[tuple[int | None, list[int]]]:
    """Per row the last known token, and the guesses after it."""
    if plan.drafts is None:
        return [(None, [])] * len(plan.rows)
    counts, guesses = plan.drafts.num_drafts, plan.drafts.token_ids
    assert len(guesses) == counts.sum() and (plan.num_scheduled > counts).all()
    assert counts.dtype == guesses.dtype == plan.drafts.last_token_ids.dtype == np.int32
    parts = np.split(guesses, np.cumsum(counts)[:-1])
    return [
        (last, part.tolist())
        for last, part in zip(plan.drafts.last_token_ids.tolist(), parts, strict=True)
    ]


def adapted(key: str, context: Sequence[int]) -> list[int]:
    """What a model with this adapter makes of `context`, the plain one makes of this."""
    return [*key.encode(), *context] if key else [*context]


class FakeHandle:
    def __init__(self, executor: FakeExecutor, result: StepResult) -> None:
        self._executor = executor
        self._result = result

    def result(self) -> StepResult:
        self._executor.log.append("read")
        assert self._executor.unread[0] is self, "results are read out of order"
        self._executor.unread.popleft()
        return self._result


class FakeExecutor:
    """Asserts the promises of `jaxinfer.engine.plan`. `log` holds "execute", "sample" and "read" in their order."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, next_token: NextToken = hashed_token
    ) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.num_compilations = 0
        self.on_compile: Callable[[], None] | None = None
        self.step_costs = STEP_COSTS
        self.next_token = next_token
        self.plans: list[StepPlan] = []
        self.masks: list[TokenMask | None] = []
        self.log: list[str] = []
        self.unread: deque[FakeHandle] = deque()
        self.shut_down = False
        self.asleep: set[str] = set()
        self.is_invalid: Callable[[Sequence[int]], bool] = lambda context: False
        self.num_grouped = 0
        self.num_logprobs: int | None = None
        self.prompt_logprobs = False
        self.folders: dict[str, str] = {}
        """The content of adapters by path."""
        self.num_reads = 0
        self.on_host: set[str] = set()
        self.slots: dict[int, str] = {}
        self._rows: dict[int, DeviceRow] = {}
        self._owner: dict[int, tuple[int, int]] = {}
        self._kv = np.full((num_blocks, config.cache.block_size), -1, np.int64)
        self._generation = 0

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(3000, 4000)

    def read_adapter(self, path: str) -> str:
        if path not in self.folders:
            raise ValueError(f"{path} holds no adapter.")
        self.num_reads += 1
        self.on_host.add(self.folders[path])
        return self.folders[path]

    def drop_adapter(self, key: str) -> None:
        self.on_host.remove(key)

    def _fill_slots(self, plan: StepPlan) -> None:
        if self.config.lora is None:
            assert not plan.adapters
            return
        assert len(self.on_host) <= self.config.lora.max_cpu_loras
        for load in plan.adapters:
            assert 1 <= load.slot <= self.config.lora.max_loras and load.key in self.on_host
            self.slots[load.slot] = load.key

    def execute_model(self, plan: StepPlan) -> None:
        assert not self.asleep
        self.log.append("execute")
        self.plans.append(plan)
        limits, block_size = self.config.scheduler, self.config.cache.block_size
        counts = plan.num_scheduled.tolist()
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert min(counts) >= 1
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= limits.max_num_seqs
        assert counts == sorted(counts, key=lambda count: count != 1), "one-token rows come first"
        for array in (plan.rows, plan.num_scheduled, plan.num_computed, plan.block_ids):
            assert array.dtype == np.int32
        self._fill_slots(plan)
        for admitted in plan.admitted:
            self._generation += 1
            slot = admitted.adapter_slot
            adapter = self.slots[slot] if slot else ""
            row = DeviceRow(self._generation, adapter_slot=slot, adapter=adapter)
            self._rows[admitted.row] = row
            for token in admitted.token_ids.tolist():
                row.append(token)
            row.admitted = len(row.tokens)
            assert admitted.row in plan.rows
        for forced in plan.forced:
            first, *rest = forced.token_ids.tolist()
            forced_row = self._rows[forced.row]
            assert forced_row.tokens[forced.start :] == [first], "the mask forced another token"
            assert rest
            for token in rest:
                forced_row.append(token)
            forced_row.admitted = len(forced_row.tokens)
        windows = self.config.cache.windows
        assert plan.block_ids.ndim == (1 if len(windows) == 1 or not plan.block_ids.size else 2)
        block_ids = plan.block_ids.reshape(len(windows), -1).T.tolist()
        for row, col, blocks in zip(
            plan.block_rows.tolist(), plan.block_cols.tolist(), block_ids, strict=True
        ):
            for block, window in zip(blocks, windows, strict=True):
                assert 0 < block < self.num_blocks or (not block and window)
            assert col == len(self._rows[row].blocks), "block tables grow at their end"
            assert row in plan.rows
            self._rows[row].blocks.append(blocks)
        speculates = self.config.speculative is not None
        assert (plan.drafts is not None) == speculates
        for row_id, count, computed, samples, (last, drafts) in zip(
            plan.rows.tolist(),
            counts,
            plan.num_computed.tolist(),
            plan.samples.tolist(),
            _drafts(plan),
            strict=True,
        ):
            row = self._rows[row_id]
            assert self.slots.get(row.adapter_slot, "") == row.adapter, "another has its slot"
            # Guesses are computed like known tokens, and known by nobody.
            known_end, end = computed + count - len(drafts), computed + count
            if speculates and known_end > row.admitted:
                assert known_end - computed > 1 or last == row.tokens[computed]
            if row.computed is None:
                row.computed = computed
                row.shared = computed // block_size
                assert computed % block_size == 0, "only full blocks are shared"
            assert computed == row.computed
            assert known_end <= len(row.tokens), "a token is computed before it is known"
            assert samples == (known_end == len(row.tokens))
            assert samples or not drafts
            assert end < self.config.model.max_model_len
            needed = -(-end // block_size)
            assert len(row.blocks) == needed or (speculates and len(row.blocks) > needed), (
                "neither too few blocks nor more than needed"
            )
            prefixes = row.extended(drafts)
            for position in range(computed, end):
                assert position // block_size >= row.shared
                for group, block in enumerate(row.blocks[position // block_size]):
                    assert block > 0, "nothing is written outside of a window"
                    if position % block_size == 0:
                        self._owner[block] = (row_id, row.generation)
                    assert self._owner[block] == (row_id, row.generation), "a block has two writers"
                    self._kv[block, position % block_size] = prefixes[position] + group
            row.computed = known_end
        if plan.prefix_groups is not None:
            self._check_groups(plan)

    def _check_groups(self, plan: StepPlan) -> None:
        """Of rows that decode, all of whose shared blocks come before what they compute."""
        cascade, block_size = self.config.cascade, self.config.cache.block_size
        assert cascade.enabled and (plan.num_scheduled == 1).all()
        sizes = plan.prefix_groups.num_rows.tolist()
        counts = plan.prefix_groups.num_blocks.tolist()
        assert 1 <= len(sizes) == len(counts) <= MAX_PREFIX_GROUPS
        first = 0
        for size, count in zip(sizes, counts, strict=True):
            assert size >= cascade.min_rows and count * block_size >= cascade.min_tokens
            members = plan.rows[first : first + size].tolist()
            shared = {
                tuple(blocks[0] for blocks in self._rows[row].blocks[:count]) for row in members
            }
            assert len(shared) == 1 and self.config.cache.windows[0] is None
            assert min(plan.num_computed[first : first + size]) >= count * block_size
            first += size
        assert first <= len(plan.rows)
        self.num_grouped += first

    def sample_tokens(self, mask: TokenMask | None) -> FakeHandle:
        self.log.append("sample")
        self.masks.append(mask)
        plan = self.plans[-1]
        masked = {}
        if mask is not None:
            num_before = (
                np.zeros_like(mask.positions) if mask.num_before is None else mask.num_before
            )
            keys = zip(mask.positions.tolist(), num_before.tolist(), strict=True)
            masked = dict(zip(keys, mask.words, strict=True))
        tokens, invalid, counts = [], [], []
        firsts = plan.num_computed.tolist()
        for i, (row_id, samples, (_, drafts), first) in enumerate(
            zip(plan.rows.tolist(), plan.samples, _drafts(plan), firsts, strict=True)
        ):
            row = self._rows[row_id]
            self._check_reads(row, first)
            invalid.append(False)
            counts.append(1)
            if not samples:
                tokens.append(-12345)
                continue
            assert row.computed is not None
            context = adapted(row.adapter, row.tokens[: row.computed])
            run = self._verify(context, drafts, {j: masked.get((i, j)) for j in range(9)})
            if not run:
                invalid[-1], run = True, [0]
            counts[-1] = len(run)
            tokens += run
            for token in run:
                row.append(token)
            row.computed += len(run) - 1
        handle = FakeHandle(self, self._result(plan, tokens, invalid, counts))
        self.unread.append(handle)
        overlap = self.config.scheduler.async_scheduling and self.config.speculative is None
        assert len(self.unread) <= (2 if overlap else 1)
        return handle

    def _check_reads(self, row: DeviceRow, first: int) -> None:
        """The row has computed its tokens from position `first` on."""
        assert row.computed is not None
        for group, window in enumerate(self.config.cache.windows):
            seen = np.arange(0 if window is None else max(first - window + 1, 0), row.computed)
            column, offset = np.divmod(seen, self.config.cache.block_size)
            held = self._kv[np.array(row.blocks)[column, group], offset] - group
            expected = row.prefixes[seen[0] : row.computed] if seen.size else []
            assert held.tolist() == expected, "the KV cache holds another's tokens"

    def _verify(
        self, context: Sequence[int], drafts: Sequence[int], words: dict[int, np.ndarray | None]
    ) -> list[int]:
        """The tokens that would be sampled one after the other, as far as each was guessed; none: not a number."""
        run: list[int] = []
        for j, guess in enumerate([*drafts, None]):
            allowed = words[j]
            assert j or allowed is None or allowed.any()
            if self.is_invalid([*context, *run]) or not (allowed is None or allowed.any()):
                break
            token = self.next_token([*context, *run])
            while allowed is not None and not int(allowed[token // 32]) >> (token % 32) & 1:
                token = (token + 1) % self.config.model.vocab_size
            run.append(token)
            if token != guess:
                break
        return run

    def _result(
        self, plan: StepPlan, tokens: list[int], invalid: list[bool], counts: list[int]
    ) -> StepResult:
        result = StepResult(np.array(tokens, np.int32), np.array(invalid))
        if plan.drafts is not None and plan.drafts.num_drafts.any():
            result = replace(result, num_tokens=np.array(counts, np.int32))
        if self.num_logprobs is not None:
            result = replace(result, logprobs=self._logprobs(tokens))
        if self.prompt_logprobs:
            result = replace(
                result,
                prompt_logprobs={
                    i: self._logprobs(self._rows[row].tokens[computed + 1 : computed + count + 1])
                    for i, (row, count, computed) in enumerate(
                        zip(plan.rows.tolist(), plan.num_scheduled, plan.num_computed, strict=True)
                    )
                },
            )
        return result

    def _logprobs(self, tokens: list[int]) -> LogprobArrays:
        columns = np.arange((self.num_logprobs or 0) + 1)
        ids = np.array(tokens, np.int32)[:, None] + columns
        return LogprobArrays(ids, -ids.astype(np.float32), np.array(tokens, np.int32) + 1)

    def sleep(self, level: int) -> None:
        assert not self.unread
        self.slots = {}
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Collection[str]) -> None:
        self.log.append(f"wake up {' '.join(sorted(tags))}")
        self.asleep -= set(tags)
        self._kv[:] = -1

    def shutdown(self) -> None:
        self.shut_down = True
