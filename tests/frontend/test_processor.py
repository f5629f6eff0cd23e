from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.frontend.processor import Processor
from jaxinfer.sampling_params import SamplingParams
from tests.frontend.tokenizers_for_tests import byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.vocab_size
MAX_LEN = 32


def make(generation_config=None, tokenizer=TOKENIZER, use_defaults=True, **model):
    config = ModelConfig("m", "m", "float32", MAX_LEN, tokenizer.vocab_size, **model)
    return Processor(config, tokenizer, generation_config, use_defaults)


PROCESSOR = make()


def test_cache_salt_is_handed_on():
    for prompt in ({"prompt": "The fox"}, {"prompt_token_ids": [5, 6]}):
        assert core_request(prompt).cache_salt is None
        assert core_request(prompt | {"cache_salt": "x"}).cache_salt == "x"
        for salt in ("", 5, b"x", ["x"]):
            with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
                PROCESSOR.prepare(prompt | {"cache_salt": salt})


def core_request(*args, **kwargs) -> EngineCoreRequest:
    (request,) = PROCESSOR.prepare(*args, **kwargs).core_requests
    return request


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("The fox", "The fox"),
        ({"prompt": "The fox"}, "The fox"),
        ([5, 6, 7], None),
        (np.array([5, 6, 7]), None),
        ((5, 6, 7), None),
        ({"prompt_token_ids": [5, 6, 7]}, None),
        ({"prompt_token_ids": [5, 6, 7], "prompt": "carried along"}, "carried along"),
    ],
)
def test_kinds_of_prompts(prompt, text):
    prepared = PROCESSOR.prepare(prompt)
    is_text = text == "The fox"
    assert prepared.prompt == text
    assert prepared.prompt_token_ids == (TOKENIZER.encode("The fox") if is_text else [5, 6, 7])
    assert all(type(i) is int for i in prepared.prompt_token_ids)
    message = msgspec.msgpack.encode(prepared.core_requests[0])
    assert msgspec.msgpack.decode(message, type=EngineCoreRequest) == prepared.core_requests[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must not be empty"),
        ([], "prompt must not be empty"),
        ({"prompt": ""}, "prompt must not be empty"),
        ({"prompt_token_ids": []}, "prompt must not be empty"),
        ([VOCAB], f"vocabulary, got {VOCAB}"),
        ([1, -1], "vocabulary, got -1"),
        ([1, 2.5], r"prompt_token_ids\[1\] must be an integer"),
        ([1, True], r"prompt_token_ids\[1\] must be an integer"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 5}, "needs 'prompt' or 'prompt_token_ids'"),
        (5, "prompt must be a string"),
        (None, "prompt must be a string"),
        ([1] * MAX_LEN, f"at most {MAX_LEN - 1} tokens"),
    ],
)
def test_refused_prompts(prompt, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR.prepare(prompt)


def test_a_prompt_one_token_short_of_the_limit_gets_one_token():
    params = SamplingParams(max_tokens=10, min_tokens=5)
    request = core_request([1] * (MAX_LEN - 1), params)
    assert request.sampling_params.max_tokens == request.sampling_params.min_tokens == 1
    assert (params.max_tokens, params.min_tokens) == (10, 5), "the caller's are left alone"


def test_open_max_tokens_fills_the_context():
    assert core_request([1, 2], SamplingParams(max_tokens=None)).sampling_params.max_tokens == 30
    assert core_request([1, 2], SamplingParams(max_tokens=7)).sampling_params.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {999999: 5}}, "logit_bias holds token id 999999"),
        ({"stop_token_ids": [999999], "min_tokens": 2}, "stop_token_ids holds token id 999999"),
        ({"allowed_token_ids": [0, VOCAB]}, f"allowed_token_ids holds token id {VOCAB}"),
        ({"logprobs": 21}, r"logprobs must be at most max_logprobs \(20\), got 21"),
        ({"logprobs": -1}, "whole vocabulary"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most"),
    ],
)
def test_parameters_beyond_the_model(fields, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR.prepare([1], SamplingParams(**fields))


def test_logit_bias_entries_are_counted():
    config = ModelConfig("m", "m", "float32", MAX_LEN, 5000)
    processor = Processor(config, TOKENIZER)
    processor.prepare([1], SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)))
    with pytest.raises(ValueError, match="at most 1024 entries, got 1025"):
        processor.prepare([1], SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)))


def test_logprobs_of_the_whole_vocabulary_where_the_engine_allows_it():
    processor = make(max_logprobs=VOCAB)
    (request,) = processor.prepare([1], SamplingParams(logprobs=-1)).core_requests
    assert request.sampling_params.logprobs == VOCAB


def test_fields_changed_after_construction_are_validated():
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        PROCESSOR.prepare([1], params)
    with pytest.raises(ValueError, match="sampling_params"):
        PROCESSOR.prepare([1], {"top_p": 1})
    with pytest.raises(ValueError, match="priority"):
        PROCESSOR.prepare([1], priority=0.5)


def test_greedy_requests_carry_no_filters():
    params = core_request([1], SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1))
    filters = params.sampling_params
    assert (filters.top_p, filters.top_k, filters.min_p) == (1.0, 0, 0.0)


def test_end_of_sequence_ids_come_from_generation_config_and_tokenizer():
    processor = make({"eos_token_id": [3, 9999, 5]})
    (request,) = processor.prepare([1]).core_requests
    assert request.eos_token_ids == [3, 5, TOKENIZER.eos_token_id]
    (request,) = processor.prepare([1], SamplingParams(ignore_eos=True)).core_requests
    assert request.eos_token_ids == []
    assert core_request([1]).eos_token_ids == [TOKENIZER.eos_token_id]


GENERATION_CONFIG = {
    "temperature": 0.3,
    "top_k": 7,
    "top_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 9,
    "do_sample": True,
    "eos_token_id": 3,
}


def test_generation_config_sets_defaults_for_those_who_pass_nothing():
    processor = make(GENERATION_CONFIG)
    expected = SamplingParams(temperature=0.3, top_k=7, repetition_penalty=1.1, max_tokens=9)
    assert processor.get_default_sampling_params() == expected
    (request,) = processor.prepare([1]).core_requests
    assert request.sampling_params == expected
    (request,) = processor.prepare([1], SamplingParams()).core_requests
    assert request.sampling_params == SamplingParams()


def test_generation_defaults_can_be_left_out_but_its_end_ids_count():
    processor = make(GENERATION_CONFIG, use_defaults=False)
    assert processor.get_default_sampling_params() == SamplingParams()
    assert 3 in processor.prepare([1]).core_requests[0].eos_token_ids


def test_bad_words_with_and_without_a_space_before_them():
    params = core_request("x", SamplingParams(bad_words=["fox", " lazy dog"])).sampling_params
    expected = [TOKENIZER.encode(text) for text in ("fox", " fox", "lazy dog", " lazy dog")]
    assert params.bad_words_token_ids == expected


def test_bad_words_where_every_word_starts_with_a_space_anyway():
    tokenizer = sentencepiece_tokenizer()
    (request,) = (
        make(tokenizer=tokenizer).prepare([1], SamplingParams(bad_words=["a"])).core_requests
    )
    assert request.sampling_params.bad_words_token_ids == [tokenizer.encode("a", False)]


def test_n_becomes_children_with_their_own_seeds():
    params = SamplingParams(n=3, seed=-2, prompt_logprobs=1)
    prepared = PROCESSOR.prepare("The fox", params, request_id="mine")
    children = prepared.core_requests
    assert len({child.request_id for child in children}) == 3
    assert [child.sampling_params.n for child in children] == [1, 1, 1]
    seeds = [child.sampling_params.seed for child in children]
    assert seeds[0] == -2 and seeds[2] == 0 and len(set(seeds)) == 3 and None not in seeds
    assert [child.sampling_params.prompt_logprobs for child in children] == [1, None, None]
    assert prepared.request_id == "mine" and prepared.sampling_params.n == 3


def test_seeds_stay_within_64_bits():
    children = PROCESSOR.prepare([1], SamplingParams(n=2, seed=2**63 - 1)).core_requests
    assert [child.sampling_params.seed for child in children] == [2**63 - 1, -(2**63)]


def test_ids_of_the_core_are_unique_whatever_callers_say():
    requests = [core_request([1], request_id="same") for _ in range(3)] + [core_request([1])]
    assert len({request.request_id for request in requests}) == 4


def test_long_ids_of_callers_stay_with_the_frontend():
    first, second = (PROCESSOR.prepare("The fox", request_id="x" * 10_000) for _ in range(2))
    assert first.request_id == second.request_id == "x" * 10_000
    ids = {request.request_id for p in (first, second) for request in p.core_requests}
    assert len(ids) == 2 and max(map(len, ids)) < 100
