"""Temperature 0, prompt "Here is the English alphabet: ABC", stop "DEFGHIJ", streamed: no fragment of the stop string
comes out early, and what was held back is flushed when generation ends otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer import AsyncLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.real

PROMPT = "Here is the English alphabet: ABC"


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(smollm2_gguf), max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    yield llm
    llm.shutdown()


def stream(llm: AsyncLLM, prompt: str, **params) -> tuple[list[str], str | None, int]:
    """The pieces as they came, the reason of the end, and the number of tokens."""

    async def use():
        pieces, tokens, reason = [], 0, None
        sampling = SamplingParams(
            temperature=0.0, output_kind=RequestOutputKind.DELTA, ignore_eos=True, **params
        )
        async for output in llm.generate(prompt, sampling):
            [completion] = output.outputs
            pieces.append(completion.text)
            tokens += len(completion.token_ids)
            reason = completion.finish_reason
        return pieces, reason, tokens

    return asyncio.run(use())


@pytest.fixture(scope="module")
def alphabet(llm: AsyncLLM) -> str:
    """How the prompt goes on without a stop string."""
    return "".join(stream(llm, PROMPT, max_tokens=24)[0])


@pytest.mark.parametrize("continued", ["DEFGHIJ", "DEF", "GHIJKLMNOPQ"])
def test_no_fragment_of_the_stop_string_comes_out(llm, alphabet, continued):
    free = alphabet
    start = free.find(continued)
    assert start >= 0, f"the model went on otherwise: {free!r}"
    pieces, reason, _ = stream(llm, PROMPT, max_tokens=24, stop=continued)
    assert reason == "stop" and "".join(pieces) == free[:start]
    text = ""
    for piece in pieces:
        text += piece
        assert free.startswith(text)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_what_was_held_back_comes_out_at_another_end(llm, max_tokens):
    free = "".join(stream(llm, PROMPT, max_tokens=max_tokens)[0])
    # Begins like the stop string as far as the output goes, and then differs.
    pieces, reason, tokens = stream(llm, PROMPT, max_tokens=max_tokens, stop=free + "~~")
    assert reason == "length" and tokens == max_tokens
    assert "".join(pieces) == free and "".join(pieces[:-1]) == ""


def test_chinese_logprobs_hold_no_broken_characters(llm):
    """A Chinese prompt with logprobs=1: where a token ends inside a character, its text comes with a later token."""

    async def use():
        params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True)
        stream = llm.generate("你好，请介绍一下北京这座城市：", params)
        return [output async for output in stream][-1].outputs[0]

    completion = asyncio.run(use())
    texts = [
        position[token].decoded_token
        for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert all("\ufffd" not in text for text in texts)
    joined = "".join(texts)
    assert any("\u4e00" <= c <= "\u9fff" for c in joined), "the model answered without Chinese"
    assert completion.text.rstrip("\ufffd") == joined[: len(completion.text.rstrip("\ufffd"))]
    assert any(text == "" for text in texts), "no token ended inside a character"
