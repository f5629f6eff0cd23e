"""What a step's result means for each request: stops, failures, logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxinfer.engine.messages import FinishReason
from tests.engine.core_runs import alone, make_core, run
from tests.engine.fake_requests import MAX_MODEL_LEN, VOCAB, make_request


def counter(context: Sequence[int]) -> int:
    """The next token is the length of what is there."""
    return len(context)


@pytest.mark.parametrize("overlap", [True, False])
def test_stops(overlap: bool) -> None:
    core, _ = make_core(next_token=counter, overlap=overlap, max_num_seqs=8)
    collected = run(
        core,
        [
            make_request("eos", [0] * 5, eos=[7, 9], max_tokens=20),
            make_request("id", [0] * 5, eos=[9], stop_token_ids=[8], max_tokens=20),
            make_request("both", [0] * 5, eos=[8], stop_token_ids=[8], max_tokens=20),
            make_request("length", [0] * 5, max_tokens=4),
            make_request("model_len", [0] * 5, max_tokens=None),
            make_request("last_is_stop", [0] * 5, stop_token_ids=[8], max_tokens=4),
            make_request("one", [0] * (MAX_MODEL_LEN - 1), max_tokens=20),
            make_request("outside", [0] * 5, stop_token_ids=[VOCAB + 100], max_tokens=2),
        ],
    )
    assert collected.ends == {
        "eos": (FinishReason.STOP, None),
        "id": (FinishReason.STOP, 8),
        "both": (FinishReason.STOP, None),
        "length": (FinishReason.LENGTH, None),
        "model_len": (FinishReason.LENGTH, None),
        "last_is_stop": (FinishReason.STOP, 8),
        "one": (FinishReason.LENGTH, None),
        "outside": (FinishReason.LENGTH, None),
    }
    assert collected.tokens["id"] == [5, 6, 7, 8]
    assert len(collected.tokens["model_len"]) == MAX_MODEL_LEN - 5
    assert len(collected.tokens["one"]) == 1


def test_a_long_output_outgrows_its_first_buffer() -> None:
    core, _ = make_core(num_blocks=300, max_model_len=400, budget=512)
    requests = [make_request("a", 5, max_tokens=300), make_request("b", 5, max_tokens=30)]
    collected = run(core, requests)
    for request in requests:
        assert collected.tokens[request.request_id] == alone(request, max_model_len=400)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_nan_logits_fail_that_request_alone(overlap: bool) -> None:
    core, executor = make_core(overlap=overlap)
    good, bad = make_request("good", 4, max_tokens=6), make_request("bad", [11] * 4, max_tokens=6)
    executor.is_invalid = lambda context: context[0] == 11 and len(context) >= 6
    collected = run(core, [bad, good])
    reason, text = collected.ends["bad"]
    assert reason is FinishReason.ERROR and str(text).startswith("NaN logits")
    assert len(collected.tokens["bad"]) == 2
    assert collected.tokens["good"] == alone(good)[0]
    assert core.scheduler.kv.pool.num_free == 63


def test_logprobs_go_to_those_who_asked() -> None:
    core, executor = make_core(overlap=False)
    executor.num_logprobs = 5
    collected = run(
        core,
        [
            make_request("none", 3, max_tokens=2),
            make_request("two", 3, max_tokens=2, logprobs=2),
            make_request("zero", 3, max_tokens=2, logprobs=0),
        ],
    )
    for outputs in collected.outputs:
        assert sorted(outputs.logprobs) == [1, 2]
        token = outputs.token_ids[1]
        assert outputs.logprobs[1].token_ids == [token, token + 1, token + 2]
        assert outputs.logprobs[1].logprobs == [-token, -token - 1, -token - 2]
        assert outputs.logprobs[1].rank == token + 1
        assert outputs.logprobs[2].token_ids == [outputs.token_ids[2]]


def test_logprobs_are_matched_to_their_rows_in_a_mixed_step() -> None:
    core, executor = make_core(overlap=False, threshold=2)
    executor.num_logprobs = 0
    collected = run(
        core,
        [
            make_request("long", 9, max_tokens=2, logprobs=0),
            make_request("short", 1, max_tokens=7, logprobs=0),
        ],
    )
    for outputs in collected.outputs:
        for i, token in enumerate(outputs.token_ids):
            assert outputs.logprobs[i].token_ids == [token]


def test_prompt_logprobs_come_once_even_when_the_prompt_is_computed_twice() -> None:
    core, executor = make_core(num_blocks=7, max_model_len=24, threshold=3)
    executor.prompt_logprobs = True
    requests = [make_request(n, 8, max_tokens=14, prompt_logprobs=0) for n in "ab"]
    silent = make_request("c", 2, max_tokens=1)
    collected = run(core, [*requests, silent])
    assert sum(o.stats.num_preemptions for o in collected.outputs if o.stats)
    for request in requests:
        told = [
            entry.token_ids[0]
            for outputs in collected.outputs
            for entry in outputs.prompt_logprobs.get(request.request_id, [])
        ]
        assert told[:7] == request.prompt_token_ids[1:]
        assert len(told) == 7
    assert not any("c" in outputs.prompt_logprobs for outputs in collected.outputs)
