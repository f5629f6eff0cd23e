from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.core import NO_TOKEN_LEFT
from jaxinfer.engine.messages import EngineCoreRequest, FinishReason
from jaxinfer.engine.token_masks import pack_tokens
from tests.engine.core_runs import alone, make_core, run
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import VOCAB, make_request


def first_of(request: EngineCoreRequest, count: int = 1) -> list[int]:
    """What the request's first tokens are when nothing is forbidden."""
    free = make_request(request.request_id, request.prompt_token_ids, max_tokens=count)
    return alone(free)[0]


def num_waits(executor: FakeExecutor) -> int:
    """How often sampling waited for an earlier step's tokens, its own forward being launched."""
    return "".join(entry[0] for entry in executor.log).count("er")


def test_bits_are_packed_little_end_first() -> None:
    words = pack_tokens([0, 33, 49, -1, 50, 1000], VOCAB)
    assert words.dtype == np.uint32 and words.tolist() == [1, 2 | 1 << 17]
    assert pack_tokens([], 64).tolist() == [0, 0]
    assert pack_tokens(range(64), 64).tolist() == [0xFFFFFFFF] * 2


def test_min_tokens_hold_back_every_stop_token_and_no_longer_than_that() -> None:
    core, executor = make_core()
    request = make_request("a", 4)
    wanted = first_of(request, 6)
    params = {"min_tokens": 3, "stop_token_ids": wanted[1:2], "max_tokens": 6}
    request = make_request("a", 4, eos=wanted[:1], **params)
    free = make_request("free", 5, max_tokens=6)
    collected = run(core, [free, request])
    assert not {wanted[0], wanted[1]} & set(collected.tokens["a"][:3])
    assert (collected.tokens["a"], collected.ends["a"]) == alone(request)
    for step, mask in enumerate(executor.masks):
        if step < 3:
            assert mask is not None and mask.positions.tolist() == [1]
            allowed = set(range(VOCAB)) - {wanted[0], wanted[1]}
            assert mask.words.tolist() == [pack_tokens(allowed, VOCAB).tolist()]
        else:
            assert mask is None
    assert num_waits(executor) == 0


def test_a_chunk_that_does_not_sample_needs_no_mask() -> None:
    core, executor = make_core(threshold=4)
    run(core, [make_request("a", 10, eos=[1], min_tokens=1, max_tokens=2)])
    assert [mask is None for mask in executor.masks] == [True, True, False, True]


def test_only_allowed_tokens_are_sampled() -> None:
    core, executor = make_core()
    request = make_request("a", 4, allowed_token_ids=[3, 17, 40], max_tokens=8)
    assert run(core, [request]).tokens["a"] == alone(request)[0]
    assert set(alone(request)[0]) <= {3, 17, 40}
    assert num_waits(executor) == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_word_is_never_completed(overlap: bool) -> None:
    core, executor = make_core(overlap=overlap)
    wanted = first_of(make_request("a", 4), 4)
    others = [make_request(f"other{i}", 6, max_tokens=9) for i in range(2)]
    for words in ([wanted[:1]], [wanted[:2]], [wanted[1:4]], [wanted[:2], wanted[1:4], [9]]):
        request = make_request("a", 4, bad_words_token_ids=words, max_tokens=9)
        collected = run(core, [*others, request])
        assert collected.tokens["a"] == alone(request)[0] != first_of(request, 9)
        for word in words:
            text = collected.tokens["a"]
            assert all(text[i : i + len(word)] != word for i in range(len(text)))
        for other in others:
            assert collected.tokens[other.request_id] == alone(other)[0]
    assert (num_waits(executor) > 0) is overlap


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    core, _ = make_core()
    first = first_of(make_request("a", [5, 6, 7]))[0]
    request = make_request("a", [5, 6, 7], bad_words_token_ids=[[7, first]], max_tokens=2)
    assert run(core, [request]).tokens["a"][0] == first


def test_bad_words_of_one_token_do_not_wait_for_the_output() -> None:
    core, executor = make_core()
    run(core, [make_request("a", 4, bad_words_token_ids=[[3], [4]], max_tokens=8)])
    assert num_waits(executor) == 0


def test_a_stop_seen_while_sampling_waits_drops_the_row() -> None:
    """The step's forward was launched with the row in it; the mask must not touch its next owner."""
    wanted = first_of(make_request("a", 4), 3)
    core, _ = make_core()
    bad = [[wanted[2], 1]]
    requests = [
        make_request("a", 4, eos=[wanted[2]], bad_words_token_ids=bad, max_tokens=9),
        make_request("b", 5, bad_words_token_ids=[[1, 2]], max_tokens=9),
    ]
    collected = run(core, requests)
    for request in requests:
        got = collected.tokens[request.request_id], collected.ends[request.request_id]
        assert got == alone(request)


def test_a_request_that_has_just_ended_is_not_found_stuck() -> None:
    core, _ = make_core(max_num_seqs=2)
    params = {"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5]], "stop_token_ids": [5]}
    other = make_request("other", 4, min_tokens=6, max_tokens=6)
    collected = run(core, [other, make_request("a", 4, max_tokens=6, **params)])
    assert collected.ends["a"] == (FinishReason.STOP, 5)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [
        ({"allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]}, 0),
        ({"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5], [6]]}, 0),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5, 5]]}, 2),
    ],
)
def test_a_request_left_without_tokens_ends_with_an_error(
    params: dict, num_tokens: int, overlap: bool
) -> None:
    core, executor = make_core(overlap=overlap)
    other = make_request("other", 4, max_tokens=6)
    collected = run(core, [make_request("a", 4, max_tokens=6, **params), other])
    assert collected.ends["a"] == (FinishReason.ERROR, NO_TOKEN_LEFT)
    assert collected.tokens.get("a", []) == [5] * num_tokens
    assert collected.tokens["other"] == alone(other)[0]
    assert core.scheduler.kv.pool.num_free == 63
    for mask in executor.masks:
        assert mask is None or mask.words.any(axis=1).all()


def test_masks_survive_preemption_and_row_reuse() -> None:
    core, _ = make_core(num_blocks=9, max_num_seqs=3)
    requests = [
        make_request("a", 7, allowed_token_ids=[1, 2, 3, 4, 5], max_tokens=18),
        make_request("b", 7, eos=range(0, 50, 2), min_tokens=11, max_tokens=18),
        make_request("c", 7, bad_words_token_ids=[[i, i + 1] for i in range(40)], max_tokens=18),
        make_request("d", 3, max_tokens=5),
        make_request("e", 3, eos=range(0, 50, 2), max_tokens=5),
    ]
    collected = run(core, requests)
    assert sum(o.stats.num_preemptions for o in collected.outputs if o.stats)
    for request in requests:
        got = collected.tokens[request.request_id], collected.ends[request.request_id]
        assert got == alone(request)
