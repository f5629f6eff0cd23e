"""A real model through the public API: what a plain install, on the oldest supported JAX too, has to be able to do."""

from __future__ import annotations

import pytest

from jaxinfer import LLM, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.jax_floor]


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    with LLM(str(smollm2_gguf), dtype="float32", max_model_len=256, max_num_seqs=4) as llm:
        yield llm


def test_completes_a_well_known_sentence(llm):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.finished and output.outputs[0].finish_reason in ("length", "stop")


def test_chat_answers_in_order_and_alike_alone_or_together(llm):
    questions = ["What is 2 + 2?", "Name the largest planet.", "What colour is the sky?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    together = llm.chat(conversations, params, use_tqdm=False)
    for conversation, question, output in zip(conversations, questions, together, strict=True):
        assert question in output.prompt
        (alone,) = llm.chat(conversation, params, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == len(questions)


def test_seed_decides_a_sampled_completion(llm):
    def sample(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=16)
        return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
