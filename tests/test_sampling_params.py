from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from jaxinfer.sampling_params import RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = {
    "n": [0, -1, 16385, 1.0, True, "1", None],
    "presence_penalty": [-2.1, 2.1, NAN, INF, "0", True],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF, None],
    "repetition_penalty": [0, -1.0, NAN, INF],
    "temperature": [-1, -0.001, NAN, INF, "0", True, None, 10**400],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN],
    "top_k": [-2, 1.5, 2**31, True, NAN],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [2**63, -(2**63) - 1, 1.0, "x", True],
    "stop": ["", ["a", ""], [1], 5, {"a": 1}, ["x"] * 65],
    "stop_token_ids": [[-1], [1.5], [True], 7, "7", [2**31]],
    "ignore_eos": [1, "yes", None],
    "max_tokens": [0, -1, 1.5, True, 2**31],
    "min_tokens": [-1, 17, 1.0, None],
    "logprobs": [-2, 1.0, True],
    "prompt_logprobs": [-2, "1"],
    "logprob_token_ids": [[-1], ["1"], 3, "abc"],
    "flat_logprobs": [1, None],
    "extra_args": [[], "x", 1],
    "detokenize": [1, None],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": [0],
    "include_stop_str_in_output": ["no"],
    "output_kind": [3, "delta", None],
    "logit_bias": [{1: NAN}, {-1: 0.0}, {1: "1"}, {"x": 1.0}, {1: True}, [1], {1.5: 1.0}],
    "allowed_token_ids": [[], [-1], ["1"], 3],
    "bad_words": [[""], [" "], [1], "word"],
    "bad_words_token_ids": [[[]], [[-1]]],
    "skip_reading_prefix_cache": [1, "yes"],
    "structured_outputs": [1, {}, {"regex": "a", "json_object": True}, {"no_such_field": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_refused_values_name_their_field(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_every_field_is_covered_by_the_refusals():
    assert set(REFUSED) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("n", 0, "at least 1"),
        ("n", 99999, "at most 16384"),
        ("temperature", -1, "at least 0"),
        ("top_p", 0, r"\(0, 1\]"),
        ("top_p", 1.5, r"\[0, 1\]"),
        ("presence_penalty", 3, r"\[-2, 2\]"),
        ("min_tokens", 17, r"max_tokens \(16\)"),
    ],
)
def test_messages_say_the_limit_and_the_value(name, value, limit):
    with pytest.raises(ValueError, match=limit) as caught:
        SamplingParams(**{name: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16384},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"top_p": 1, "min_p": 1, "top_k": -1},
        {"top_k": 0},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 500},
        {"max_tokens": 1, "min_tokens": 1},
        {"logprobs": 0, "prompt_logprobs": -1},
        {"stop": ["a"] * 64},
        {"temperature": 1e30},
        {"stop": [], "detokenize": False},
    ],
)
def test_limits_themselves_are_allowed(fields):
    SamplingParams(**fields)


def test_combinations_that_make_no_sense():
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_defaults():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n) == (16, 1.0, 1)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.greedy and params.stop_strings == []


def test_values_are_brought_to_plain_types():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=1,
        stop=("a", "b"),
        stop_token_ids=np.array([3, 4]),
        allowed_token_ids={5},
        logit_bias={"7": 1, 8: 500, 9: -INF},
        seed=-1,
    )
    assert type(params.n) is int and type(params.temperature) is float
    assert type(params.top_p) is float
    assert params.stop == ["a", "b"] and params.stop_strings == ["a", "b"]
    assert params.stop_token_ids == [3, 4] and params.allowed_token_ids == [5]
    assert params.logit_bias == {7: 1.0, 8: 100.0, 9: -100.0}
    assert params.seed is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_tiny_temperatures(caplog):
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not caplog.records
    params = SamplingParams(temperature=1e-4)
    assert params.temperature == 0.01 and not params.greedy
    assert "temperature" in caplog.text


def test_decoding_a_message_validates_too():
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"top_p": 0.0}), type=SamplingParams)
