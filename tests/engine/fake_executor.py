"""A device that costs nothing and trusts nobody: a slot of its KV cache holds a hash of all tokens up to it and of the
group of layers, as keys and values depend on all of them, and every plan is checked against what the executor may rely
on. And the oracle: the same tokens, one request at a time."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from jaxinfer.config import (
    CacheConfig,
    CascadeConfig,
    CompilationConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.grammars import GrammarBackend
from jaxinfer.engine.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from jaxinfer.engine.plan import (
    MAX_PREFIX_GROUPS,
    Int32,
    LogprobArrays,
    StepPlan,
    StepResult,
    TokenMask,
)
from jaxinfer.engine.scheduled_step import ScheduledStep
from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative_config import SpeculativeConfig, speculative_config

VOCAB = 50
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
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
CASCADE = CascadeConfig(min_rows=2, min_tokens=BLOCK_SIZE)

NextToken = Callable[[Sequence[int]], int]


def hashed_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def make_config(
    *,
    max_num_seqs: int = 4,
    budget: int = 16,
    threshold: int = 0,
    policy: str = "fcfs",
    overlap: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    block_size: int = BLOCK_SIZE,
    prefix_caching: bool = True,
    hash_algo: str = "sha256",
    cache_aware: bool = False,
    max_overtakes: int = 64,
    jump_ahead_max_rows: int = 64,
    cascade: CascadeConfig = CASCADE,
    speculative: SpeculativeConfig | None = None,
    windows: tuple[int | None, ...] = (None,),
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", "fake", "float32", max_model_len, VOCAB),
        load=LoadConfig(),
        cache=CacheConfig(
            block_size,
            enable_prefix_caching=prefix_caching,
            prefix_caching_hash_algo=hash_algo,  # type: ignore[arg-type]
            windows=windows,
        ),
        scheduler=SchedulerConfig(
            budget,
            max_num_seqs,
            threshold,
            policy,  # type: ignore[arg-type]
            overlap,
            cache_aware,
            max_overtakes,
            jump_ahead_max_rows,
        ),
        parallel=ParallelConfig(),
        compilation=CompilationConfig(),
        device="cpu",
        cascade=cascade,
        speculative=speculative,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int] | int = 5,
    *,
    eos: Sequence[int] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
    salt: str | None = None,
    grammar: str | None = None,
    **params: object,
) -> EngineCoreRequest:
    """`prompt` as a number: that many tokens, others for every request id."""
    if isinstance(prompt, int):
        seed = zlib.crc32(request_id.encode())
        prompt = [(seed >> (i % 24)) % VOCAB for i in range(prompt)]
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
        arrival_time,
        list(eos),
        priority,
        salt,
        grammar,
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
    admitted: int = 0
    """Tokens that the executor was told at the row's admission, or since as forced ones."""

    def append(self, token: int) -> None:
        before = self.prefixes[-1] if self.prefixes else 0
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


class Guesses:
    """A source of drafts that knows what the fake device samples, and errs now and then: the guess at a place is wrong
    for one context in `wrong` (1: always, 0: never)."""

    def __init__(self, core: EngineCore, wrong: int, next_token: NextToken) -> None:
        self._table = core.scheduler.table
        self._wrong = wrong
        self._next_token = next_token

    def drafts(self, row: int, limit: int) -> Int32:
        context = self._table.token_ids(row, 0, int(self._table.num_tokens[row])).tolist()
        guesses = []
        for _ in range(limit):
            token = self._next_token(context)
            if self._wrong and zlib.crc32(bytes(context)) % self._wrong == 0:
                token = (token + 1) % VOCAB
            guesses.append(token)
            context.append(token)
        return np.array(guesses, np.int32)

    def store(self, step: ScheduledStep, result: StepResult) -> None:
        pass

    def clear(self) -> None:
        pass


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
        self._rows: dict[int, DeviceRow] = {}
        self._owner: dict[int, tuple[int, int]] = {}
        self._kv = np.full((num_blocks, config.cache.block_size), -1, np.int64)
        self._generation = 0

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(3000, 4000)

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
        for admitted in plan.admitted:
            self._generation += 1
            self._rows[admitted.row] = row = DeviceRow(self._generation)
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
            context = row.tokens[: row.computed]
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
        self.log.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Collection[str]) -> None:
        self.log.append(f"wake up {' '.join(sorted(tags))}")
        self.asleep -= set(tags)
        self._kv[:] = -1

    def shutdown(self) -> None:
        self.shut_down = True


def make_core(
    num_blocks: int = 64,
    next_token: NextToken = hashed_token,
    grammars: GrammarBackend | None = None,
    wrong_guesses: int | None = None,
    **config: object,
) -> tuple[EngineCore, FakeExecutor]:
    """`wrong_guesses`: see `Guesses`; drafts come from these where the engine speculates."""
    resolved = make_config(**config)  # type: ignore[arg-type]
    executor = FakeExecutor(resolved, num_blocks, next_token)
    core = EngineCore(resolved, executor, grammars)
    if core.scheduler.speculation is not None and wrong_guesses is not None:
        core.scheduler.speculation.source = Guesses(core, wrong_guesses, next_token)
    return core, executor


def speculative(num_tokens: int = 3, **more: object) -> SpeculativeConfig:
    given = {"method": "ngram", "num_speculative_tokens": num_tokens, **more}
    return speculative_config(given, "cpu")


@dataclass
class Collected:
    """What all outputs together said of each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple[FinishReason, int | str | None]] = field(default_factory=dict)
    first_scheduled: list[str] = field(default_factory=list)
    outputs: list[EngineCoreOutputs] = field(default_factory=list)

    def add(self, outputs: EngineCoreOutputs) -> None:
        self.outputs.append(outputs)
        self.first_scheduled += [times.request_id for times in outputs.first_scheduled]
        counts = outputs.num_tokens or [1] * len(outputs.request_ids)
        tokens = iter(outputs.token_ids)
        for request_id, count in zip(outputs.request_ids, counts, strict=True):
            assert request_id not in self.ends, "a token after the end"
            self.tokens.setdefault(request_id, []).extend(islice(tokens, count))
        assert next(tokens, None) is None
        for finished in outputs.finished:
            assert finished.request_id not in self.ends, "two ends"
            self.ends[finished.request_id] = (finished.reason, finished.stop_reason)


def run(
    core: EngineCore, requests: Sequence[EngineCoreRequest] = (), max_steps: int = 1000
) -> Collected:
    """Add the requests and step until nothing is left."""
    collected = Collected()
    for request in requests:
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_unfinished():
            return collected
        collected.add(core.step())
    raise AssertionError(f"still unfinished after {max_steps} steps")


def alone(
    request: EngineCoreRequest,
    next_token: NextToken = hashed_token,
    max_model_len: int = MAX_MODEL_LEN,
) -> tuple[list[int], tuple[FinishReason, int | str | None]]:
    """The oracle: tokens and end of a request that has the machine to itself, written as naively as can be."""
    params = request.sampling_params
    prompt, output = request.prompt_token_ids, []
    stops = [*request.eos_token_ids, *(params.stop_token_ids or [])]
    while True:
        allowed = set(
            range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
        )
        if len(output) < params.min_tokens:
            allowed -= set(stops)
        for word in params.bad_words_token_ids or []:
            if " ".join(map(str, ["", *output])).endswith(" ".join(map(str, ["", *word[:-1]]))):
                allowed.discard(word[-1])
        if not allowed:
            return output, (FinishReason.ERROR, None)
        token = next_token([*prompt, *output])
        while token not in allowed:
            token = (token + 1) % VOCAB
        output.append(token)
        if len(output) >= params.min_tokens:
            if token in request.eos_token_ids:
                return output, (FinishReason.STOP, None)
            if token in stops:
                return output, (FinishReason.STOP, token)
        if len(prompt) + len(output) == max_model_len or len(output) == params.max_tokens:
            return output, (FinishReason.LENGTH, None)
