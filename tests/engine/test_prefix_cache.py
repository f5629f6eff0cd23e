"""Prefix caching as the scheduler does it. The fake device checks that every block holds what its user needs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.messages import EngineCoreRequest
from tests.engine.core_runs import Collected, alone, make_core, run
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import make_request

PROMPT = [7, 1, 30, 4, 22, 9, 3, 41, 5, 5, 18, 2, 11, 27, 6, 33, 8]


def computed(executor: FakeExecutor) -> int:
    return sum(plan.num_tokens for plan in executor.plans)


def cached_tokens(collected: Collected) -> dict[str, int]:
    return {
        admission.request_id: admission.num_cached_tokens
        for outputs in collected.outputs
        for admission in outputs.first_scheduled
    }


def hit_rate(collected: Collected) -> tuple[int, int]:
    stats = [outputs.stats for outputs in collected.outputs if outputs.stats is not None]
    return sum(s.prefix_cache_queries for s in stats), sum(s.prefix_cache_hits for s in stats)


def is_alone(request: EngineCoreRequest, collected: Collected) -> bool:
    name = request.request_id
    return (collected.tokens[name], collected.ends[name]) == alone(request)


@pytest.mark.parametrize("algo", ["sha256", "xxhash"])
@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (16, 12), (17, 16)]
)
def test_a_repeated_prompt_hits_its_full_blocks_but_computes_its_last_token(
    length: int, hit: int, algo: str
) -> None:
    core, executor = make_core(hash_algo=algo)
    first, again = (make_request(name, PROMPT[:length], max_tokens=1) for name in "ab")
    run(core, [first])
    assert computed(executor) == length
    collected = run(core, [again])
    assert cached_tokens(collected) == {"b": hit}
    assert computed(executor) == 2 * length - hit
    assert hit_rate(collected) == (length, hit)
    assert is_alone(again, collected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_output", range(1, 10))
def test_what_was_generated_is_found_too(num_output: int, overlap: bool) -> None:
    """The next turn of a conversation. The last generated token was never computed."""
    core, _ = make_core(overlap=overlap)
    answer = run(core, [make_request("a", PROMPT[:6], max_tokens=num_output)]).tokens["a"]
    turn = make_request("b", [*PROMPT[:6], *answer, 1, 2], max_tokens=3)
    collected = run(core, [turn])
    assert cached_tokens(collected) == {"b": (6 + num_output - 1) // 4 * 4}
    assert is_alone(turn, collected)


def test_what_the_host_has_not_seen_is_not_registered() -> None:
    """A request that ends with two steps in flight: the block is full, but its last token only the device knows."""
    core, _ = make_core()
    run(core, [make_request("before", 3, max_tokens=2)])  # leaves its tokens in the row that a gets
    scheduler = core.scheduler
    scheduler.add_request(make_request("a", PROMPT[:3], max_tokens=9))
    for _ in range(2):
        assert scheduler.schedule() is not None
    scheduler.finish([scheduler.requests["a"]])
    assert not any(
        scheduler.prefix_cache.find(probe(core, [*PROMPT[:3], token, 1])).num_blocks
        for token in range(50)
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_a_running_request_shares_what_it_has_filled(overlap: bool) -> None:
    core, _ = make_core(overlap=overlap)
    tokens, _ = alone(make_request("a", PROMPT[:6], max_tokens=15))
    core.add_request(make_request("a", PROMPT[:6], max_tokens=15))
    for _ in range(10):
        core.step()
    collected = run(core, [make_request("b", [*PROMPT[:6], *tokens], max_tokens=2)])
    # 6 + 9 or 10 tokens are known, one fewer is computed.
    assert cached_tokens(collected)["b"] == 12


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [1024, 300, 64])
def test_64_requests_together_compute_their_common_prefix_once(overlap: bool, budget: int) -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(50) for _ in range(512)]
    requests = [
        make_request(str(i), prefix + [rng.randrange(50) for _ in range(32)], max_tokens=1)
        for i in range(64)
    ]
    core, executor = make_core(
        4000, max_num_seqs=64, budget=budget, max_model_len=1024, block_size=16, overlap=overlap
    )
    collected = run(core, requests)
    assert computed(executor) == 512 + 64 * 32
    assert len(executor.plans) == -(-computed(executor) // budget), "and no step is left idle"
    assert cached_tokens(collected) == {"0": 0} | {str(i): 512 for i in range(1, 64)}
    assert hit_rate(collected) == (64 * 544, 63 * 512)


def test_who_would_compute_the_same_chunk_waits_and_lets_others_pass() -> None:
    """With chunks of 8, the second of two equal prompts could only compute the first's next chunk a second time."""
    core, executor = make_core(threshold=8, budget=16, overlap=False)
    same = [make_request(name, [*PROMPT, ord(name) % 50], max_tokens=2) for name in "ab"]
    other = make_request("other", 6, max_tokens=2)
    for request in [*same, other]:
        core.add_request(request)
    order: list[list[str]] = []
    collected = Collected()
    while core.has_unfinished():
        collected.add(core.step())
        order.append([r.request_id for r in core.scheduler.running])
    assert order[0] == ["a", "other"]
    assert cached_tokens(collected) == {"a": 0, "other": 0, "b": 16}
    assert executor.plans[1].num_scheduled.tolist() == [1, 8, 2], (
        "shared in the step that computes it"
    )
    assert all(is_alone(request, collected) for request in [*same, other])


def test_a_block_that_a_chunk_of_one_token_completes_is_shared_too() -> None:
    core, executor = make_core(threshold=5, overlap=False)
    requests = [
        make_request("a", PROMPT[:16], max_tokens=1),
        make_request("b", PROMPT, max_tokens=1),
    ]
    assert cached_tokens(run(core, requests)) == {"a": 0, "b": 16}
    assert [plan.num_scheduled.tolist() for plan in executor.plans] == [[5], [5], [5], [1, 1]]


def test_who_waits_goes_on_when_the_other_is_gone() -> None:
    core, _ = make_core(threshold=4, budget=16, overlap=False)
    for name in "ab":
        core.add_request(make_request(name, PROMPT, max_tokens=2))
    core.step()
    assert [r.request_id for r in core.scheduler.running] == ["a"]
    core.abort_requests(["a"])
    collected = run(core)
    assert cached_tokens(collected) == {"b": 4}


def test_a_preempted_request_finds_its_own_blocks() -> None:
    core, executor = make_core(num_blocks=10, max_model_len=28, overlap=False)
    requests = [make_request(name, 8, max_tokens=16) for name in "ab"]
    collected = run(core, requests)
    again = [
        (len(admitted.token_ids), int(plan.num_computed[plan.rows.tolist().index(admitted.row)]))
        for plan in executor.plans
        for admitted in plan.admitted
    ][2:]
    assert again, "nothing was preempted"
    assert all(found > 0 for _, found in again)
    assert cached_tokens(collected) == {"a": 0, "b": 0} and hit_rate(collected) == (16, 0)
    assert all(is_alone_in_28(request, collected) for request in requests)


def is_alone_in_28(request: EngineCoreRequest, collected: Collected) -> bool:
    return collected.tokens[request.request_id] == alone(request, max_model_len=28)[0]


def test_the_longest_unused_prefix_is_evicted_first_and_from_its_end() -> None:
    core, _ = make_core(num_blocks=10)
    old, new = PROMPT[:16], PROMPT[15::-1]
    run(core, [make_request("old", old, max_tokens=1)])
    run(core, [make_request("new", new, max_tokens=1)])
    # 8 of 9 blocks are cached. Three are needed: the unused one, then the end of the old prompt.
    run(core, [make_request("third", [49] * 9, max_tokens=1)])
    cache = core.scheduler.prefix_cache
    found = [cache.find(probe(core, tokens)).num_blocks for tokens in (old, new)]
    assert found == [2, 3]


def probe(core: EngineCore, tokens: Sequence[int]):
    from jaxinfer.engine.request import Request

    return Request(make_request("probe", tokens, max_tokens=1), core._config.model, 0)


def test_who_must_not_read_computes_everything_but_leaves_it_for_others() -> None:
    core, executor = make_core()
    run(core, [make_request("a", PROMPT, max_tokens=1)])
    for name, params in (
        ("skips", {"skip_reading_prefix_cache": True}),
        ("scores", {"prompt_logprobs": 1}),
    ):
        before = computed(executor)
        collected = run(core, [make_request(name, PROMPT, max_tokens=1, **params)])
        assert computed(executor) - before == len(PROMPT)
        assert cached_tokens(collected) == {name: 0} and hit_rate(collected) == (0, 0)
    core.reset_prefix_cache()
    run(core, [make_request("s", PROMPT, max_tokens=1, skip_reading_prefix_cache=True)])
    assert cached_tokens(run(core, [make_request("b", PROMPT, max_tokens=1)])) == {"b": 16}


def test_salts_keep_requests_apart() -> None:
    core, _ = make_core()

    def hits(name: str, salt: str | None) -> int:
        request = make_request(name, PROMPT, max_tokens=1, salt=salt)
        return cached_tokens(run(core, [request]))[name]

    assert [hits("a", None), hits("b", "x"), hits("c", "y")] == [0, 0, 0]
    assert [hits("d", None), hits("e", "x"), hits("f", "y")] == [16, 16, 16]


def test_without_prefix_caching_everything_is_computed() -> None:
    core, executor = make_core(prefix_caching=False)
    for name in "ab":
        collected = run(core, [make_request(name, PROMPT, max_tokens=1)])
        assert cached_tokens(collected) == {name: 0} and hit_rate(collected) == (0, 0)
    assert computed(executor) == 2 * len(PROMPT)


def test_a_reset_forgets_what_was_and_what_is_being_computed() -> None:
    core, _ = make_core(overlap=False)
    run(core, [make_request("a", PROMPT, max_tokens=1)])
    core.add_request(make_request("b", PROMPT, max_tokens=9))
    core.step()
    core.reset_prefix_cache()
    for _ in range(4):
        core.step()
    collected = run(core, [make_request("c", PROMPT, max_tokens=2)])
    assert cached_tokens(collected) == {"c": 0}
    assert collected.tokens["b"] == alone(make_request("b", PROMPT, max_tokens=9))[0][5:]
    collected = run(core, [make_request("d", PROMPT, max_tokens=2)])
    assert cached_tokens(collected) == {"d": 16}, "from then on it is a cache again"
    # What b generated later came from keys and values that it computed before.
    answer, _ = alone(make_request("b", PROMPT, max_tokens=9))
    collected = run(core, [make_request("e", [*PROMPT, *answer], max_tokens=2)])
    assert cached_tokens(collected) == {"e": 16}


def test_a_reset_while_a_prompt_is_half_computed() -> None:
    core, _ = make_core(threshold=8, overlap=False)
    core.add_request(make_request("a", PROMPT, max_tokens=2))
    core.step()
    core.reset_prefix_cache()
    request = make_request("b", PROMPT, max_tokens=2)
    collected = run(core, [request])
    assert cached_tokens(collected) == {"b": 0} and is_alone(request, collected)


def test_shared_blocks_are_counted_once() -> None:
    core, _ = make_core(num_blocks=9, max_num_seqs=4, budget=32, overlap=False)
    # Four blocks, and one more for each of the others: all fit into eight.
    requests = [make_request(name, [*PROMPT[:16], ord(name) % 50], max_tokens=3) for name in "abcd"]
    for request in requests:
        core.add_request(request)
    stats = core.step().stats
    assert stats is not None and stats.num_running == 4 and stats.kv_cache_usage == 1.0
    collected = run(core)
    assert {r.request_id for r in requests} == set(collected.ends)
    assert core.scheduler.kv.pool.usage == 0.0
