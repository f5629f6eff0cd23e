"""Requests with adapters, over the real executor: each gets what transformers makes of the merged weights."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from jaxinfer import LLM, LoRARequest, SamplingParams
from tests.tiny_llm import MAX_LEN, SMALL, VOCAB, ids, oracle_logits, tiny_llm_dir
from tests.tiny_lora import ATTENTION, MLP, logits_of, merged_model, write_adapter

OPTIONS = SMALL | dict(
    max_num_seqs=9,
    enable_lora=True,
    max_loras=8,
    max_lora_rank=8,
    max_logprobs=VOCAB,
)
NUM_TOKENS = 6
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
)
KINDS = [
    (dict(rank=1), {"": 2.0}),
    (dict(rank=2, targets=ATTENTION), {"": 2.0}),
    (dict(rank=3, targets=MLP, lora_alpha=1.5), {"": 0.5}),
    (dict(rank=4, use_rslora=True, lora_alpha=3), {"": 1.5}),
    (dict(rank=5, targets=("q_proj", "v_proj")), {"": 2.0}),
    (dict(rank=6, rank_pattern={"down_proj": 8, "q_proj": 2}), {"down_proj": 1.5, "q_proj": 6, "": 2}),
    (dict(rank=7, targets=("k_proj", "o_proj", "up_proj"), alpha_pattern={"o_proj": 7}), {"o_proj": 1, "": 2}),
    (dict(rank=8), {"": 2.0}),
]
"""Adapters of every kind, and the scale of each one's modules."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"kind{i}", i + 1, str(write_adapter(root / f"kind{i}", i, **kind)))
        for i, (kind, _) in enumerate(KINDS)
    ]


@pytest.fixture(scope="module")
def merged(adapters):
    return [
        merged_model(adapter.lora_path, scales)
        for adapter, (_, scales) in zip(adapters, KINDS, strict=True)
    ]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), **OPTIONS) as llm:
        yield llm


def prompts(number):
    return [ids("A prompt that takes two chunks."[: 20 + i]) for i in range(number)]


def assert_equal(output, model):
    """All logprobs, of the prompt and of the output, and the tokens that are the likeliest."""
    completion, prompt = output.outputs[0], list(output.prompt_token_ids)
    expected = logits_of(model, prompt + completion.token_ids)
    got = [*output.prompt_logprobs[1:], *completion.logprobs]
    rows = np.array([[position[v].logprob for v in range(VOCAB)] for position in got])
    np.testing.assert_allclose(rows, scipy.special.log_softmax(expected[:-1], axis=1), atol=1e-4)
    assert completion.token_ids == expected[len(prompt) - 1 : -1].argmax(axis=1).tolist()


def test_eight_adapters_and_none_in_one_batch(llm, adapters, merged):
    from tests.tiny_checkpoints import tiny_model
    from tests.tiny_llm import NAME

    requests = [*adapters, None]
    outputs = llm.generate(prompts(9), GREEDY, use_tqdm=False, lora_request=requests)
    for output, model in zip(outputs, [*merged, tiny_model(NAME)], strict=True):
        assert_equal(output, model)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) > 5


def test_two_devices(adapters, merged):
    options = OPTIONS | dict(tensor_parallel_size=2)
    with LLM(str(tiny_llm_dir()), **options) as llm:
        requests = [adapters[7], adapters[5]]
        outputs = llm.generate(prompts(2), GREEDY, use_tqdm=False, lora_request=requests)
    assert_equal(outputs[0], merged[7])
    assert_equal(outputs[1], merged[5])
