"""Outputs of scripted core steps; expected texts come from the tokenizer's own decode."""

from __future__ import annotations

import time

import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.engine.messages import (
    Admission,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.frontend.processor import Processor
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.sampling_params import RequestOutputKind, SamplingParams
from tests.frontend.tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PROCESSOR = Processor(ModelConfig("m", "m", "float32", 512, TOKENIZER.vocab_size), TOKENIZER)
EOS = TOKENIZER.eos_token_id
CUMULATIVE, DELTA, FINAL = RequestOutputKind


def ids(text):
    return TOKENIZER.encode(text)


class Bench:
    """One output processor, and a script for its core."""

    def __init__(self):
        self.processor = OutputProcessor(TokenText(TOKENIZER))
        self.outputs = []

    def add(self, prompt="The fox", kind=CUMULATIVE, request_id=None, **params):
        params = SamplingParams(output_kind=kind, max_tokens=None, **params)
        prepared = PROCESSOR.prepare(prompt, params, request_id)
        self.processor.add(prepared, self.outputs.append)
        return [core.request_id for core in prepared.core_requests]

    def step(self, tokens, finished=(), **columns):
        """`tokens`: core id -> its new tokens."""
        step = EngineCoreOutputs(
            request_ids=list(tokens),
            token_ids=[t for new in tokens.values() for t in new],
            num_tokens=[len(new) for new in tokens.values()],
            finished=[FinishedRequest(*end) for end in finished],
            timestamp=time.monotonic(),
            **columns,
        )
        aborts = self.processor.process(step)
        new, self.outputs[:] = list(self.outputs), []
        return new, aborts


@pytest.fixture
def bench():
    return Bench()


def stream(bench, core_id, tokens, last=(FinishReason.LENGTH, None)):
    """Feed tokens one per step; the last one ends the request. Returns all outputs."""
    collected = []
    for i, token in enumerate(tokens):
        finished = [(core_id, *last)] if i == len(tokens) - 1 else []
        collected += bench.step({core_id: [token]}, finished)[0]
    return collected


TEXT = " jumps over é🙂 日"


def test_cumulative_outputs_grow_to_the_whole(bench):
    (core_id,) = bench.add()
    outputs = stream(bench, core_id, ids(TEXT))
    texts = [o.outputs[0].text for o in outputs]
    assert texts == sorted(texts, key=len) and texts[-1] == TEXT
    assert all(TEXT.startswith(text) for text in texts)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, len(outputs) + 1))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].prompt == "The fox" and outputs[-1].prompt_token_ids == ids("The fox")


def test_deltas_join_to_the_whole(bench):
    (core_id,) = bench.add(kind=DELTA)
    outputs = stream(bench, core_id, ids(TEXT))
    assert "".join(o.outputs[0].text for o in outputs) == TEXT
    assert [token for o in outputs for token in o.outputs[0].token_ids] == ids(TEXT)


def test_final_only_is_one_output(bench):
    (core_id,) = bench.add(kind=FINAL)
    (output,) = stream(bench, core_id, ids(TEXT))
    assert output.finished and output.outputs[0].text == TEXT
    assert output.outputs[0].token_ids == ids(TEXT)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_end_of_sequence_token_is_an_id_but_no_text(bench, kind):
    for params, text in (
        ({}, " x"),
        ({"skip_special_tokens": False}, " x"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, " x<|end|>"),
    ):
        (core_id,) = bench.add(kind=kind, **params)
        outputs = stream(bench, core_id, [*ids(" x"), EOS], (FinishReason.STOP, None))
        last = outputs[-1].outputs[0]
        whole = "".join(o.outputs[0].text for o in outputs) if kind is DELTA else last.text
        assert whole == text
        assert last.token_ids[-1] == EOS and (last.finish_reason, last.stop_reason) == (
            "stop",
            None,
        )


def test_a_stop_token_is_reported_as_the_reason(bench):
    stop = ids("x")[0]
    (core_id,) = bench.add(stop_token_ids=[stop])
    outputs = stream(bench, core_id, [*ids("ab"), stop], (FinishReason.STOP, stop))
    last = outputs[-1].outputs[0]
    assert (last.text, last.stop_reason, last.token_ids[-1]) == ("ab", stop, stop)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_the_request_and_aborts_it_in_the_core(bench, kind):
    (core_id,) = bench.add(kind=kind, stop=["lazy dog", "zzz"])
    texts, last = "", None
    tokens = ids(" over the lazy dog. Here")
    aborted = False
    for token in tokens:
        outputs, aborts = bench.step({core_id: [token]})
        for output in outputs:
            last = output
            texts += output.outputs[0].text
            assert "laz" not in output.outputs[0].text
        aborted = aborted or aborts == [core_id]
        assert not aborts or last.finished
    assert aborted
    completion = last.outputs[0]
    assert (texts if kind is DELTA else completion.text) == " over the "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "lazy dog")
    assert bench.processor.num_unfinished == 0 and bench.processor.requests() == []


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(bench):
    (core_id,) = bench.add(stop="x", logprobs=0)
    tokens = ids("abxcd")
    scored = {i: TokenLogprobs([t], [-1.0], 1) for i, t in enumerate(tokens)}
    end = [(core_id, FinishReason.LENGTH, None)]
    ((output,), aborts) = bench.step({core_id: tokens}, end, logprobs=scored)
    completion = output.outputs[0]
    assert completion.text == "ab" and completion.finish_reason == "stop"
    used = len(completion.token_ids)
    assert TOKENIZER.decode(completion.token_ids).endswith("x") and used < len(tokens)
    assert len(completion.logprobs) == used and completion.cumulative_logprob == -used
    assert aborts == [], "the core has ended it already"


def test_tokens_of_an_aborted_request_are_ignored(bench):
    (core_id,) = bench.add(request_id="mine")
    bench.step({core_id: ids("a")})
    assert bench.processor.abort(bench.processor.requests("mine")) == [core_id]
    (output,) = bench.outputs
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "a"
    bench.outputs.clear()
    assert bench.step({core_id: ids("b")}, [(core_id, FinishReason.ABORT, None)]) == ([], [])
    assert bench.processor.abort(bench.processor.requests("mine")) == []


def test_two_requests_with_the_same_id(bench):
    (first,) = bench.add(request_id="same")
    (second,) = bench.add(request_id="same")
    length = FinishReason.LENGTH
    outputs, _ = bench.step(
        {first: ids("a"), second: ids("b")}, [(first, length), (second, length)]
    )
    assert sorted(o.outputs[0].text for o in outputs) == ["a", "b"]
    assert {o.request_id for o in outputs} == {"same"}


def test_an_error_in_the_engine_is_told(bench):
    (core_id,) = bench.add(kind=FINAL)
    ((output,), _) = bench.step({}, [(core_id, FinishReason.ERROR, "NaN in the logits")])
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "NaN in the logits")


def test_the_cores_list_of_ids_may_be_reused(bench):
    """As the core does while its batch stays the same, also after one of them was stopped by a string."""
    (a,), (b,) = bench.add(stop="x"), bench.add(kind=FINAL)
    same = [a, b]
    for text in ("q", "x", "y", "z"):
        token = ids(text)
        bench.processor.process(EngineCoreOutputs(request_ids=same, token_ids=token * 2))
    end = EngineCoreOutputs(finished=[FinishedRequest(b, FinishReason.LENGTH)])
    bench.processor.process(end)
    by_id = {o.request_id: o.outputs[0].text for o in bench.outputs if o.finished}
    assert sorted(by_id.values()) == ["q", "qxyz"]


# ---- several completions ---------------------------------------------------------------------------------------------


def test_final_only_waits_for_every_completion(bench):
    one, two = bench.add(kind=FINAL, n=2)
    length = FinishReason.LENGTH
    assert bench.step({one: ids("a"), two: ids("b")}, [(two, length)]) == ([], [])
    ((output,), _) = bench.step({one: ids("c")}, [(one, length)])
    assert output.finished and [c.text for c in output.outputs] == ["ac", "b"]
    assert [c.index for c in output.outputs] == [0, 1]


def test_streamed_completions_come_together(bench):
    one, two = bench.add(kind=DELTA, n=2)
    ((output,), _) = bench.step({one: ids("a"), two: ids("b")})
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]
    ((output,), _) = bench.step({two: ids("c")}, [(two, FinishReason.LENGTH)])
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(1, "c", "length")]
    assert not output.finished
    ((output,), _) = bench.step({one: ids("d")}, [(one, FinishReason.LENGTH)])
    assert output.finished
    one, two = bench.add(kind=CUMULATIVE, n=2)
    bench.step({one: ids("a"), two: ids("b")})
    ((output,), _) = bench.step({two: ids("c")})
    assert [c.text for c in output.outputs] == ["a", "bc"]


# ---- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_hold_the_chosen_token_and_the_candidates(bench):
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    (core_id,) = bench.add(logprobs=2)
    scored = {0: TokenLogprobs([c, a, b], [-3.0, -0.5, -1.0], 9)}
    ((output,), _) = bench.step({core_id: [c]}, logprobs=scored)
    (position,) = output.outputs[0].logprobs
    assert [(i, p.logprob, p.rank, p.decoded_token) for i, p in position.items()] == [
        (c, -3.0, 9, "c"),
        (a, -0.5, 1, "a"),
        (b, -1.0, 2, "b"),
    ]
    scored = {0: TokenLogprobs([b, a, b], [-1.0, -0.5, -1.0], 2)}
    ((output,), _) = bench.step({core_id: [b]}, logprobs=scored)
    position = output.outputs[0].logprobs[1]
    assert list(position) == [b, a] and position[b].rank == 2
    assert output.outputs[0].cumulative_logprob == -4.0


def test_decoded_tokens_are_valid_text_that_joins_to_the_output(bench):
    tokens = ids("日本🙂é x")
    assert len(tokens) > 8, "characters take several tokens here"
    (core_id,) = bench.add(logprobs=1, prompt="日本語の🙂")
    other = ids("🙂")[0]
    for i, token in enumerate(tokens):
        scored = {0: TokenLogprobs([token, other], [-1.0, -2.0], 1)}
        end = [(core_id, FinishReason.LENGTH)] if i == len(tokens) - 1 else []
        outputs, _ = bench.step({core_id: [token]}, end, logprobs=scored)
    positions = outputs[-1].outputs[0].logprobs
    decoded = [position[t].decoded_token for t, position in zip(tokens, positions, strict=True)]
    assert "".join(decoded) == "日本🙂é x"
    assert all("\ufffd" not in p.decoded_token for position in positions for p in position.values())


def test_only_requests_that_asked_get_logprobs(bench):
    (with_logprobs,), (without,) = bench.add(logprobs=0), bench.add()
    a = ids("a")[0]
    scored = {0: TokenLogprobs([a], [-1.0], 1)}
    outputs, _ = bench.step({with_logprobs: [a], without: [a]}, logprobs=scored)
    assert [o.outputs[0].logprobs is None for o in outputs] == [False, True]
    assert [o.outputs[0].cumulative_logprob for o in outputs] == [-1.0, None]


def test_prompt_logprobs_come_in_chunks_and_once_in_a_stream(bench):
    prompt = ids("日本")
    for kind in (CUMULATIVE, DELTA, FINAL):
        (core_id,) = bench.add(prompt="日本", kind=kind, prompt_logprobs=0)
        scored = [TokenLogprobs([t], [-float(i)], i) for i, t in enumerate(prompt[1:], 1)]
        assert bench.step({}, prompt_logprobs={core_id: scored[:2]}) == ([], [])
        outputs, _ = bench.step({core_id: ids("a")}, prompt_logprobs={core_id: scored[2:]})
        end, _ = bench.step({core_id: ids("b")}, [(core_id, FinishReason.LENGTH)])
        first, last = (outputs or end)[0].prompt_logprobs, end[0].prompt_logprobs
        assert first[0] is None and len(first) == len(prompt)
        texts = [p[t].decoded_token for t, p in zip(prompt[1:], first[1:], strict=True)]
        assert "".join(texts).endswith("本") and "\ufffd" not in "".join(texts)
        assert (last is None) == (kind is DELTA)


def test_without_detokenize_there_is_no_text(bench):
    (core_id,) = bench.add(detokenize=False, logprobs=0)
    a = ids("a")[0]
    ((output,), _) = bench.step({core_id: [a]}, logprobs={0: TokenLogprobs([a], [-1.0], 1)})
    completion = output.outputs[0]
    assert completion.text == "" and completion.token_ids == [a]
    assert completion.logprobs[0][a].decoded_token is None


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_follow_the_request(bench):
    before = time.monotonic()
    (core_id,) = bench.add(kind=FINAL)
    scheduled = time.monotonic()
    step = {"first_scheduled": [Admission(core_id, scheduled, 16)]}
    bench.step({core_id: ids("a")}, **step)
    middle = time.monotonic()
    ((output,), _) = bench.step({core_id: ids("b")}, [(core_id, FinishReason.LENGTH)])
    m = output.metrics
    assert before <= m.arrival_time <= m.queued_time <= m.first_scheduled_time == scheduled
    assert scheduled <= m.first_token_time <= middle <= m.last_token_time == m.finished_time
    assert m.num_generation_tokens == 2
    assert output.num_cached_tokens == 16
    assert m.e2e_latency >= m.time_to_first_token >= m.time_in_queue >= 0
