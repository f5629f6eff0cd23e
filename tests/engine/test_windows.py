"""Blocks of layers with sliding windows: held as long as a token to come looks back at them, and counted so."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.plan import StepResult
from tests.engine.core_runs import alone, make_core, run
from tests.engine.fake_requests import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    make_config,
    make_request,
    speculative,
)

COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE


def columns_seen(computed: int, count: int, window: int | None, block_size: int) -> int:
    """Columns with a token that some of the `count` tokens after the first `computed` look back at, or that are theirs."""
    first = 0 if window is None else max(computed - window + 1, 0)
    return len({position // block_size for position in range(first, computed + count)})


def num_held(core: EngineCore) -> int:
    pool = core.scheduler.kv.pool
    return pool.num_blocks - 1 - pool.num_free


@pytest.mark.parametrize("overlap", [False, True])
def test_a_context_of_ten_windows_holds_what_is_seen(overlap: bool) -> None:
    """Five windowed groups to a full one, as in Gemma 3: 45 blocks a column less what fell out."""
    window, block_size, length = 64, 16, 640
    core, executor = make_core(
        300,
        windows=(None, *[window] * 5),
        block_size=block_size,
        max_model_len=length + 32,
        budget=100,
        overlap=overlap,
    )
    core.add_request(make_request("a", length, max_tokens=16))
    held = []
    while core.has_unfinished():
        num_plans = len(executor.plans)
        core.step()
        if len(executor.plans) > num_plans and core.scheduler.running:
            plan = executor.plans[-1]
            computed, count = int(plan.num_computed[0]), int(plan.num_scheduled[0])
            full, windowed = (columns_seen(computed, count, w, block_size) for w in (None, window))
            held.append(num_held(core))
            assert held[-1] == full + 5 * windowed
    # The last decode step: 41 columns, of which the windows of 64 tokens reach into 5 at most.
    assert held[-1] in (41 + 5 * 4, 41 + 5 * 5) and held[-1] < 6 * 41 / 3.5
    assert num_held(core) == 0


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_demand_covers_whatever_a_step_brings(window: int, block_size: int) -> None:
    rng = np.random.default_rng(window)
    budget = 13
    config = make_config(windows=(window,), block_size=block_size, budget=budget, max_model_len=60)
    demand = CacheDemand.of(config)
    most = 0
    for _ in range(400):
        num_rows = int(rng.integers(1, 5))
        cuts = np.sort(rng.integers(0, budget - num_rows + 1, size=num_rows - 1))
        counts = np.diff([0, *cuts, budget - num_rows]) + 1
        length = int(rng.integers(budget, 61))
        held = sum(
            columns_seen(int(rng.integers(0, length - count + 1)), count, window, block_size)
            for count in counts.tolist()
        )
        assert held <= demand.blocks(num_rows, -(-length // block_size))
        if num_rows == 1:
            most = max(most, held)
    columns = -(-60 // block_size)
    assert most >= demand.blocks(1, columns) - 3, "much more is asked for than is needed"
    for number in (0, 1, 2, 9):
        assert demand.num_requests(demand.blocks(number, columns), columns) == number
    for blocks in range(demand.blocks(1, columns)):
        fitting = demand.most_columns(blocks, columns)
        assert fitting < columns and demand.blocks(1, fitting) <= blocks
        assert demand.blocks(1, fitting + 1) > blocks


WINDOWS = [(None,), (None, 5), (None, 9, 9, 1), (6,), (3, 10)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("budget", [4, 7, 32])
def test_the_smallest_pool_serves_the_longest_requests(
    windows: tuple[int | None, ...], budget: int
) -> None:
    smallest = CacheDemand.of(make_config(windows=windows, budget=budget)).blocks(1, COLUMNS) + 1
    with pytest.raises(ValueError, match=f"it needs {smallest - 1} blocks of 4 tokens"):
        make_core(smallest - 1, windows=windows, budget=budget)
    core, _ = make_core(smallest, windows=windows, budget=budget)
    requests = [make_request(name, MAX_MODEL_LEN - 3, max_tokens=3) for name in "abc"]
    collected = run(core, requests)
    assert {r.request_id: alone(r)[0] for r in requests} == collected.tokens
    assert num_held(core) == 0


def test_windows_let_more_requests_run() -> None:
    """All of equal length: a third of the layers look back at all tokens."""
    sizes = dict(max_model_len=64, budget=16, max_num_seqs=16)
    requests = [make_request(str(i), 40, max_tokens=20) for i in range(16)]

    def most_running(windows: tuple[int | None, ...], columns: int) -> int:
        core, executor = make_core(columns * len(windows) + 1, windows=windows, **sizes)
        run(core, requests)
        return max(len(plan.rows) for plan in executor.plans)

    # As prompts they take 10 columns, at the end 15; in windows of 8 tokens never more than 4.
    without, with_windows = most_running((None,), 60), most_running((None, 8, 8), 60)
    assert 60 // 15 <= without <= 60 // 10
    assert 60 * 3 // (15 + 2 * 4) <= with_windows <= 60 * 3 // (10 + 2 * 2)


@pytest.mark.parametrize("windows", WINDOWS[1:])
@pytest.mark.parametrize("num_output", range(2, 16))
@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_turn_of_a_conversation_is_found(
    windows: tuple[int | None, ...], num_output: int, overlap: bool
) -> None:
    core, _ = make_core(windows=windows, overlap=overlap, num_blocks=300)
    run(core, [make_request(str(num_output), num_output % 4 + 1, max_tokens=num_output % 3 + 1)])
    first = make_request("a", 14, max_tokens=num_output)
    answer = run(core, [first]).tokens["a"]
    turn = make_request("b", [*first.prompt_token_ids, *answer, 1, 2], max_tokens=3)
    collected = run(core, [turn])
    (admission,) = [a for outputs in collected.outputs for a in outputs.first_scheduled]
    assert admission.num_cached_tokens == (14 + num_output - 1) // 4 * 4
    assert collected.tokens["b"] == alone(turn)[0]


@pytest.mark.parametrize("window", [1, 4, 5, 12])
def test_a_branch_in_the_middle_is_found_while_its_window_is(window: int) -> None:
    """A prompt that begins as another one did, whose blocks there fell out of the window long ago."""
    core, _ = make_core(windows=(None, window), num_blocks=64)
    first = make_request("a", 28, max_tokens=2)
    run(core, [first])

    def cached(name: str, num_common: int) -> int:
        request = make_request(name, [*first.prompt_token_ids[:num_common], 1, 2], max_tokens=2)
        collected = run(core, [request])
        assert collected.tokens[name] == alone(request)[0]
        return next(
            a.num_cached_tokens for outputs in collected.outputs for a in outputs.first_scheduled
        )

    assert cached("b", 17) == 16
    # Others take all blocks but those freed last: the beginning is there, the window before its end is not.
    scheduler = core.scheduler
    pool = scheduler.kv.pool
    middle = scheduler.prefix_cache.find(
        core.scheduler.add_request(make_request("probe", first.prompt_token_ids, max_tokens=2))
    )
    core.abort_requests(["probe"])
    assert middle.num_blocks == 6
    full = set(middle.blocks[0])
    for block in middle.blocks[0]:
        pool.share(block)
    pool.free(pool.allocate(pool.num_free))
    pool.free(full)
    assert cached("c", 17) == (16 if window == 1 else 0)


def test_room_without_windows_is_blocks_by_columns() -> None:
    demand = CacheDemand.of(make_config())
    assert demand.num_requests(61, 8) == pytest.approx(61 / 8)
    assert demand.num_requests(3, 8) == pytest.approx(3 / 8)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("wrong", [0, 3])
def test_guesses_take_no_blocks_that_are_not_there(
    windows: tuple[int | None, ...], wrong: int
) -> None:
    config = make_config(windows=windows)
    smallest = 1 + CacheDemand.of(config).blocks(1, COLUMNS)
    requests = [make_request(str(i), 5 + i, max_tokens=12 + i) for i in range(4)]
    for spare in range(0, 7 * len(windows), 2):
        core, _ = make_core(
            smallest + spare, windows=windows, speculative=speculative(3), wrong_guesses=wrong
        )
        collected = run(core, requests)
        assert {r.request_id: alone(r)[0] for r in requests} == collected.tokens


def test_what_fell_out_before_the_host_knew_it_is_not_found() -> None:
    """All steps are planned before the first one's token is read."""
    core, _ = make_core(windows=(None, 2))
    scheduler = core.scheduler
    scheduler.add_request(make_request("a", 3, max_tokens=20))
    steps = [scheduler.schedule() for _ in range(9)]
    for token, step in enumerate(steps, 7):
        assert step is not None
        scheduler.update(step, StepResult(np.array([token], np.int32), np.array([False])))
    tokens = [*make_request("a", 3).prompt_token_ids, *range(7, 16)]
    scheduler.finish([scheduler.requests["a"]])
    request = scheduler.add_request(make_request("b", tokens))
    found = scheduler.prefix_cache.find(request)
    assert found.num_blocks == 0
    assert len(scheduler.kv.pool.find(request.block_keys)) == 2, "those without a window are there"
