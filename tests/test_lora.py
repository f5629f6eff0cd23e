"""Requests with adapters, over the real executor: each gets what transformers makes of the merged weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.special

from jaxinfer import (
    LLM,
    BeamSearchParams,
    LoRARequest,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxinfer.executor import kv_cache
from tests.tiny_checkpoints import tiny_model
from tests.tiny_llm import NAME, SMALL, VOCAB, ids, tiny_llm_dir
from tests.tiny_lora import ATTENTION, MLP, logits_of, merged_model, modules, write_adapter

OPTIONS = SMALL | dict(
    max_num_seqs=9,
    enable_lora=True,
    max_loras=8,
    max_lora_rank=8,
    max_logprobs=VOCAB,
)
NUM_TOKENS = 6
ORACLE_WIDTH = tiny_model(NAME).config.hidden_size
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
)
KINDS = [
    (dict(rank=1), {"": 2.0}),
    (dict(rank=2, targets=ATTENTION), {"": 2.0}),
    (dict(rank=3, targets=MLP, lora_alpha=1.5), {"": 0.5}),
    (dict(rank=4, use_rslora=True, lora_alpha=3), {"": 1.5}),
    (dict(rank=5, targets=("q_proj", "v_proj")), {"": 2.0}),
    (
        dict(rank=6, rank_pattern={"down_proj": 8, "q_proj": 2}),
        {"down_proj": 1.5, "q_proj": 6, "": 2},
    ),
    (
        dict(rank=7, targets=("k_proj", "o_proj", "up_proj"), alpha_pattern={"o_proj": 7}),
        {"o_proj": 1, "": 2},
    ),
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


def test_adapters_come_and_go_without_a_compilation(llm, adapters, merged):
    """More of them than slots, with prefixes that are another's own, after a reload of the same folder too."""
    shared = prompts(1) * 8
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    generate = partial(llm.generate, shared, use_tqdm=False, lora_request=adapters)
    first, again = generate(greedy), generate(greedy)
    for output, cached, model in zip(first, again, merged, strict=True):
        tokens = output.outputs[0].token_ids
        assert cached.outputs[0].token_ids == tokens and cached.num_cached_tokens == 16
        logits = logits_of(model, shared[0] + tokens)[len(shared[0]) - 1 : -1]
        assert logits.argmax(axis=1).tolist() == tokens
    assert llm.list_loras() == set(range(1, 9))
    before = llm._client._core._executor.num_compilations
    moved = LoRARequest("kind0", 1, adapters[7].lora_path)
    [output] = llm.generate(shared[0], greedy, use_tqdm=False, lora_request=moved)
    assert output.outputs[0].token_ids == first[7].outputs[0].token_ids
    assert llm._client._core._executor.num_compilations == before
    assert llm.remove_lora(1) and not llm.remove_lora(1) and llm.list_loras() == set(range(2, 9))


def test_after_sleep(llm, adapters, merged):
    llm.sleep(1)
    llm.wake_up()
    [output] = llm.generate(prompts(1), GREEDY, use_tqdm=False, lora_request=adapters[7])
    assert_equal(output, merged[7])


def test_beam_search(llm, adapters, merged):
    prompt = prompts(1)[0]
    params = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    [found] = llm.beam_search([prompt], params, lora_request=adapters[0])
    expected = logits_of(merged[0], found.sequences[0].tokens)[len(prompt) - 1 : -1]
    assert found.sequences[0].tokens[len(prompt) :] == expected.argmax(axis=1).tolist()


def test_the_stacks_are_counted_as_the_devices_memory(monkeypatch):
    resident = []
    sized = kv_cache.num_blocks

    def num_blocks(*args, **kwargs):
        resident.append(kwargs["resident_bytes"])
        return sized(*args, **kwargs)

    monkeypatch.setattr(kv_cache, "num_blocks", num_blocks)
    for options in ({"enable_lora": False}, {}):
        LLM(str(tiny_llm_dir()), **(OPTIONS | options)).shutdown()
    numbers = 8 * 8 * sum(sum(shape) for shape in modules(ATTENTION + MLP).values())
    assert resident[1] - resident[0] == 4 * numbers


def test_structured_outputs(llm, adapters):
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"),
    )
    outputs = llm.generate(
        prompts(2), params, use_tqdm=False, lora_request=[adapters[0], adapters[7]]
    )
    texts = [output.outputs[0].text for output in outputs]
    assert all(text.isdigit() and len(text) == 3 for text in texts)


def test_adapters_that_do_not_fit(llm, adapters, tmp_path):
    def refused(message, request=None, prompt="a", **options):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request, **options)

    def adapter(name, **options):
        return LoRARequest(name, 99, str(write_adapter(tmp_path / name, 0, **options)))

    module = "base_model.model.model.layers.0.self_attn.q_proj"
    other = {f"{module}.lora_B.weight": np.ones((24, 4))}
    refused(
        r"of another model: .*q_proj is \(\d+, \d+\) \[out, in\].*\(24, 4\)",
        adapter("a", tensors=other),
    )
    refused("lm_head, which adapters can't change here", adapter("b", targets=("lm_head",)))
    extra = {f"base_model.model.nowhere.lora_{x}.weight": np.ones((4, 4)) for x in "AB"}
    refused("nowhere, which the model doesn't have", adapter("c", tensors=extra))
    infinite = {f"{module}.lora_A.weight": np.full((4, ORACLE_WIDTH), np.inf)}
    refused("numbers in .*q_proj that are not finite", adapter("d", tensors=infinite))
    refused("has rank 9; max_lora_rank is 8", adapter("e", rank=9))
    refused("lora_request must be a LoRARequest, got 'x'", ["x"], ["a"])
    refused("lora_request must be one for all or one per prompt", [adapters[0]] * 2, ["a"])
    assert 99 not in llm.list_loras()
    llm.generate("a", GREEDY, use_tqdm=False, lora_request=adapters[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_loras=0), "max_loras must be at least 1"),
        (dict(max_loras=4, max_cpu_loras=3), "max_cpu_loras must be at least 4, got 3"),
        (dict(lora_dtype="int8"), "lora_dtype must be one of"),
        (dict(fully_sharded_loras=True), "fully_sharded_loras must be one of"),
        (dict(deterministic=True), "enable_lora can't be combined with deterministic=True"),
        (
            dict(runner="pooling"),
            "enable_lora=True can't be combined with this model: it makes vectors",
        ),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_llm_dir()), enable_lora=True, **options)
