"""Beam search against one written over transformers' logits in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxinfer import LLM, BeamSearchParams
from tests.tiny_llm import EOS, SMALL, ids, oracle_logits, tiny_llm_dir

PROMPTS = ["abc", "To be", "{x"]


def brute_force(prompt: list[int], width: int, max_tokens: int, penalty: float, ends: bool):
    """(score, output, ended) of the best, best first. A beam may end with a token that is among its 2 `width` likeliest."""
    beams, done = [(0.0, [])], []

    def score(total: float, output: list[int]) -> float:
        return total / (len(prompt) + len(output)) ** penalty

    for _ in range(max_tokens):
        candidates = []
        for total, output in beams:
            logits = oracle_logits(prompt + output)[-1]
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token, logprob in enumerate(logprobs):
                if token == EOS and ends:
                    if np.count_nonzero(logprobs > logprob) < 2 * width:
                        done.append((score(total + logprob, output), output, True))
                else:
                    candidates.append((total + logprob, [*output, token]))
        candidates.sort(key=lambda c: -score(*c))
        beams = candidates[:width]
    done += [(score(*beam), beam[1], False) for beam in beams]
    return sorted(done, key=lambda d: -d[0])[:width]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), dtype="float32", **SMALL) as llm:
        yield llm


@pytest.mark.parametrize(
    ("width", "max_tokens", "penalty", "ignore_eos"),
    [(1, 6, 1.0, True), (4, 5, 1.0, True), (4, 6, 0.0, False), (9, 4, 2.0, False)],
)
def test_the_beams_are_those_of_the_oracle(llm, width, max_tokens, penalty, ignore_eos):
    params = BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos
    )
    outputs = llm.beam_search(PROMPTS, params)
    assert len(outputs) == len(PROMPTS)
    for text, output in zip(PROMPTS, outputs, strict=True):
        prompt = ids(text)
        expected = brute_force(prompt, width, max_tokens, penalty, not ignore_eos)
        assert len(output.sequences) == width
        for got, (score, tokens, ended) in zip(output.sequences, expected, strict=True):
            assert got.tokens == prompt + tokens
            assert got.finish_reason == ("stop" if ended else "length")
            assert got.text == llm.get_tokenizer().decode(tokens)
            length = len(prompt) + len(tokens)
            assert math.isclose(got.cum_logprob / length**penalty, score, abs_tol=1e-4)


def test_the_end_token_can_be_kept(llm):
    fields = dict(beam_width=9, max_tokens=3, length_penalty=0.0)
    without, kept = (
        llm.beam_search("abc", BeamSearchParams(**fields, include_stop_str_in_output=keep))
        for keep in (False, True)
    )
    pairs = list(zip(without[0].sequences, kept[0].sequences, strict=True))
    assert any(a.finish_reason == "stop" for a, _ in pairs)
    for a, b in pairs:
        assert b.tokens == [*a.tokens, EOS] if a.finish_reason == "stop" else b.tokens == a.tokens


def test_a_full_context_ends_the_beams(llm):
    prompt = "x" * (SMALL["max_model_len"] - 2)
    [output] = llm.beam_search(
        prompt, BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True)
    )
    assert all(len(s.tokens) == SMALL["max_model_len"] for s in output.sequences)


def test_bad_parameters(llm):
    for fields, name in [
        (dict(beam_width=0, max_tokens=1), "beam_width"),
        (dict(beam_width=2, max_tokens=0), "max_tokens"),
        (dict(beam_width=2, max_tokens=1, length_penalty=math.inf), "length_penalty"),
    ]:
        with pytest.raises(ValueError, match=name):
            BeamSearchParams(**fields)
    with pytest.raises(ValueError, match="max_logprobs"):
        llm.beam_search("a", BeamSearchParams(beam_width=40, max_tokens=1))
