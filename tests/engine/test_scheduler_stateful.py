"""Random traffic on a small engine, against requests that each had the machine to themselves.

The fake device checks every plan (blocks, budget, known tokens); here is checked what the requests and the pool see.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.messages import EngineCoreRequest, FinishReason
from tests.engine.core_runs import Collected, alone, make_core
from tests.engine.fake_requests import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    make_config,
    make_request,
    speculative,
)

COMMON = [[(7 * i) % 50 for i in range(MAX_MODEL_LEN)], [5] * MAX_MODEL_LEN]
"""Prompts begin like one of these."""
WINDOWS = [(None,), (None,), (None, 5), (None, 9, 9, 1), (6,), (3, 10)]
"""Of groups of layers."""


class Traffic(RuleBasedStateMachine):
    @initialize(
        overlap=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        spare_columns=st.integers(0, 6),
        budget=st.integers(4, 20),
        threshold=st.sampled_from([0, 0, 1, 3, 8]),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        max_overtakes=st.sampled_from([0, 0, 1, 3]),
        wrong_guesses=st.sampled_from([None, None, 0, 2]),
    )
    def start(
        self,
        overlap: bool,
        windows: tuple[int | None, ...],
        spare_columns: int,
        budget: int,
        threshold: int,
        policy: str,
        prefix_caching: bool,
        max_overtakes: int,
        wrong_guesses: int | None,
    ) -> None:
        demand = CacheDemand.of(make_config(windows=windows, budget=budget))
        self.core, self.executor = make_core(
            1 + demand.blocks(1, MAX_MODEL_LEN // BLOCK_SIZE) + spare_columns * len(windows),
            windows=windows,
            overlap=overlap,
            budget=budget,
            threshold=threshold,
            policy=policy,
            prefix_caching=prefix_caching,
            cache_aware=max_overtakes > 0,
            max_overtakes=max_overtakes,
            speculative=None if wrong_guesses is None else speculative(3),
            wrong_guesses=wrong_guesses,
        )
        self.policy = policy
        self.may_overtake = prefix_caching and (threshold > 0 or max_overtakes > 0)
        self.collected = Collected()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()
        self.nan: set[tuple[int, ...]] = set()
        self.executor.is_invalid = lambda context: tuple(context) in self.nan

    @rule(
        num_prompt=st.integers(1, MAX_MODEL_LEN - 1),
        common=st.sampled_from(COMMON),
        num_common=st.integers(0, MAX_MODEL_LEN),
        salt=st.sampled_from([None, None, "x"]),
        skips=st.sampled_from([None, None, True]),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 6),
        priority=st.integers(0, 2),
        stops=st.lists(st.integers(0, 49), max_size=6),
        bad=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=2), max_size=3),
        allowed=st.one_of(st.none(), st.none(), st.lists(st.integers(0, 49), min_size=1)),
    )
    def add(
        self,
        num_prompt: int,
        common: list[int],
        num_common: int,
        salt: str | None,
        skips: bool | None,
        max_tokens: int | None,
        min_tokens: int,
        priority: int,
        stops: list[int],
        bad: list[list[int]],
        allowed: list[int] | None,
    ) -> None:
        name = f"r{len(self.requests)}"
        own = make_request(name, num_prompt).prompt_token_ids
        request = make_request(
            name,
            (common[:num_common] + own)[:num_prompt],
            salt=salt,
            skip_reading_prefix_cache=skips,
            eos=stops[:2],
            stop_token_ids=stops[2:],
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or 6),
            priority=priority,
            bad_words_token_ids=bad or None,
            allowed_token_ids=allowed,
        )
        self.requests[name] = request
        self.core.add_request(request)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.collected.add(self.core.step())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = sorted(self.core.scheduler.requests)
        if known:
            name = data.draw(st.sampled_from(known))
            self.core.abort_requests([name])
            self.aborted.add(name)

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        """The logits after a running request's next token will be NaN."""
        names = sorted(r.request_id for r in self.core.scheduler.running)
        if names:
            name = data.draw(st.sampled_from(names))
            tokens, _ = alone(self.requests[name])
            told = len(self.collected.tokens.get(name, []))
            self.nan.add((*self.requests[name].prompt_token_ids, *tokens[: told + 1]))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    @invariant()
    def every_block_is_free_or_held_by_requests_of_one_salt(self) -> None:
        scheduler = self.core.scheduler
        pool, windows = scheduler.kv.pool, scheduler.kv.windows
        holders: dict[int, list[str | None]] = {}
        for request in scheduler.running:
            tables = scheduler.kv.block_tables[
                :, request.row, : scheduler.kv.num_blocks[request.row]
            ]
            for block in tables[tables > 0].tolist():
                holders.setdefault(block, []).append(request.cache_salt)
            assert all((table > 0).all() for table, w in zip(tables, windows, strict=True) if not w)
        assert sorted([*holders, *pool.free_queue()]) == list(range(1, pool.num_blocks))
        for block, salts in holders.items():
            assert pool.ref_count(block) == len(salts) and len(set(salts)) == 1
        if not scheduler.kv.has_windows:
            assert scheduler.kv.num_blocks.sum() == sum(map(len, holders.values()))
        assert len({r.row for r in scheduler.running}) == len(scheduler.running)
        assert scheduler.table.num_free + len(scheduler.running) == 4

    @invariant()
    def first_come_first_served(self) -> None:
        scheduler = self.core.scheduler
        if self.policy == "fcfs":
            order = [r.arrival_index for r in scheduler.waiting]
            assert order == sorted(order)
            # A request that waits for another's chunk, or for a better one, lets others pass.
            if not self.may_overtake:
                order = [r.arrival_index for r in scheduler.running] + order
                assert order == sorted(order)

    @invariant()
    def outputs_are_those_of_a_request_alone(self) -> None:
        for name, tokens in self.collected.tokens.items():
            assert tokens == alone(self.requests[name])[0][: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(100 * (len(self.requests) + 1)):
            if not self.core.has_unfinished():
                break
            self.collected.add(self.core.step())
        assert not self.core.has_unfinished(), "a request starves"
        assert self.core.scheduler.kv.pool.usage == 0.0
        for name, request in self.requests.items():
            if name in self.aborted:
                assert name not in self.collected.ends
                continue
            tokens, (reason, stop_reason) = alone(request)
            got = self.collected.tokens.get(name, [])
            end = self.collected.ends[name]
            if end[0] is FinishReason.ERROR:
                poisoned = (*request.prompt_token_ids, *got) in self.nan
                assert poisoned or reason is FinishReason.ERROR
                assert got == tokens[: len(got)]
            else:
                assert got == tokens and end == (reason, stop_reason)


Traffic.TestCase.settings = settings(
    max_examples=125, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestTraffic = Traffic.TestCase
