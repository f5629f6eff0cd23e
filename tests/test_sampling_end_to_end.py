"""What sampling parameters mean, through `LLM` and the real executor, against rules in numpy over transformers' logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.tiny_llm import (
    EOS,
    SMALL,
    TOKENIZER,
    VOCAB,
    Rule,
    ids,
    oracle_greedy,
    oracle_logits,
    tiny_llm_dir,
)

PROMPT = "The lazy dog"
NUM_TOKENS = 16


@dataclass
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: str = "length"
    stop_reason: int | str | None = None


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **fields})


def forbid(tokens: Callable[[list[int]], Iterable[int]]) -> Rule:
    """Never what `tokens` says of the output so far."""

    def rule(logits, prompt, output):
        logits = logits.copy()
        logits[list(tokens(output))] = -np.inf
        return logits

    return rule


def penalize(repetition=1.0, frequency=0.0, presence=0.0) -> Rule:
    def rule(logits, prompt, output):
        counts = np.bincount(output, minlength=VOCAB)
        seen = (counts > 0) | (np.bincount(prompt, minlength=VOCAB) > 0)
        scaled = np.where(logits > 0, logits / repetition, logits * repetition)
        return np.where(seen, scaled, logits) - frequency * counts - presence * (counts > 0)

    return rule


def bias(biases: dict[int, float]) -> Rule:
    def rule(logits, prompt, output):
        logits = logits.copy()
        for token, value in biases.items():
            logits[token] += value
        return logits

    return rule


def rules(plain: list[int]) -> dict[str, tuple[dict, Rule]]:
    """Sampling parameters, and what they mean for the logits; `plain` is the output without any."""
    pair, allowed = plain[2:4], ids("abcdefgh .,")
    stops = [plain[3], EOS]
    biases = {plain[0]: -100.0, 50: 3.0}
    penalties = dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.7)
    return {
        "bad word of one token": (
            {"bad_words": [TOKENIZER.decode(plain[1:2])]},
            forbid(lambda _: plain[1:2]),
        ),
        "bad word of two tokens": (
            {"bad_words": [TOKENIZER.decode(pair)]},
            forbid(lambda output: pair[1:] if output[-1:] == pair[:1] else []),
        ),
        "min_tokens": (
            {"min_tokens": NUM_TOKENS, "stop_token_ids": stops},
            forbid(lambda _: stops),
        ),
        "allowed_token_ids": (
            {"allowed_token_ids": allowed},
            forbid(lambda _: set(range(VOCAB)) - set(allowed)),
        ),
        "logit_bias": ({"logit_bias": biases}, bias(biases)),
        "repetition_penalty": ({"repetition_penalty": 1.6}, penalize(repetition=1.6)),
        "frequency_penalty": ({"frequency_penalty": 1.5}, penalize(frequency=1.5)),
        "presence_penalty": ({"presence_penalty": 2.0}, penalize(presence=2.0)),
        "all penalties": (penalties, penalize(1.3, 0.5, -0.7)),
    }


def ends(plain: list[int]) -> dict[str, tuple[SamplingParams, Answer]]:
    """Requests that differ from the plain one in where and how they end."""
    text = TOKENIZER.decode(plain)
    stop, token = text[5:8], plain[6]
    at, token_at = text.find(stop), plain.index(token)
    always_eos = {"logit_bias": {EOS: 100.0}}
    kept = {"include_stop_str_in_output": True}
    return {
        "plain": (greedy(), Answer(plain, text)),
        "max_tokens": (greedy(max_tokens=1), Answer(plain[:1], text[:1])),
        "stop string": (
            greedy(stop=["never", stop]),
            Answer(plain[: at + 3], text[:at], "stop", stop),
        ),
        "stop string kept": (
            greedy(stop=stop, **kept),
            Answer(plain[: at + 3], text[: at + 3], "stop", stop),
        ),
        "stop string within min_tokens": (
            greedy(stop=stop, min_tokens=NUM_TOKENS),
            Answer(plain, text),
        ),
        "stop token": (
            greedy(stop_token_ids=[token]),
            Answer(plain[: token_at + 1], text[:token_at], "stop", token),
        ),
        "stop token kept": (
            greedy(stop_token_ids=[token], **kept),
            Answer(plain[: token_at + 1], text[: token_at + 1], "stop", token),
        ),
        "end of sequence": (greedy(**always_eos), Answer([EOS], "", "stop")),
        "end of sequence after min_tokens": (
            greedy(**always_eos, min_tokens=5),
            Answer([*plain[:5], EOS], text[:5], "stop"),
        ),
        "ignore_eos": (
            greedy(**always_eos, ignore_eos=True, max_tokens=3),
            Answer([EOS] * 3, ""),
        ),
        "special tokens kept": (
            greedy(**always_eos, ignore_eos=True, max_tokens=3, skip_special_tokens=False),
            Answer([EOS] * 3, "</s>" * 3),
        ),
    }


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), **SMALL) as llm:
        yield llm


def test_every_rule_for_stops_and_tokens_in_one_batch(llm):
    plain = oracle_greedy(ids(PROMPT), NUM_TOKENS)
    assert len(TOKENIZER.decode(plain)) == NUM_TOKENS and len(set(plain)) > 6
    cases = ends(plain)
    for name, (fields, rule) in rules(plain).items():
        tokens = oracle_greedy(ids(PROMPT), NUM_TOKENS, rule)
        assert tokens != plain, f"{name} changes nothing here"
        params = greedy(ignore_eos="min_tokens" not in fields, **fields)
        cases[name] = params, Answer(tokens, TOKENIZER.decode(tokens))
    params = [params for params, _ in cases.values()]
    outputs = llm.generate([PROMPT] * len(cases), params, use_tqdm=False)
    found = {
        name: Answer(c.token_ids, c.text, c.finish_reason, c.stop_reason)
        for name, output in zip(cases, outputs, strict=True)
        for c in output.outputs
    }
    assert found == {name: answer for name, (_, answer) in cases.items()}


# ---- logprobs --------------------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def check_position(entries, chosen: int, oracle: np.ndarray, num_top: int) -> None:
    """`oracle` [V]: logprobs by transformers. Ranks may differ where two of them do not differ by more than noise."""
    assert next(iter(entries)) == chosen
    others = [token for token in entries if entries[token].rank <= num_top]
    assert len(others) == num_top and len(entries) <= num_top + 1
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(oracle[token], abs=1e-4)
        above = oracle > oracle[token] + 1e-4
        not_below = oracle > oracle[token] - 1e-4
        assert 1 + above.sum() <= entry.rank <= not_below.sum()
        assert entry.decoded_token == TOKENIZER.decode([token], skip_special_tokens=False)


def test_logprobs_are_of_the_raw_logits_whatever_was_sampled(llm):
    """Hot, penalised and masked sampling, so that the chosen tokens are often not among the likeliest."""
    params = SamplingParams(
        temperature=2.0,
        seed=4,
        presence_penalty=1.0,
        allowed_token_ids=list(range(10, 90)),
        logprobs=5,
        max_tokens=12,
        ignore_eos=True,
    )
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (completion,) = output.outputs
    oracle = log_softmax(oracle_logits(ids(PROMPT) + completion.token_ids))
    total, outside = 0.0, 0
    for i, (token, entries) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        position = oracle[len(ids(PROMPT)) - 1 + i]
        check_position(entries, token, position, 5)
        total += position[token]
        outside += len(entries) == 6
    assert outside >= 3
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_prompt_logprobs_in_one_piece_and_in_chunks():
    prompts = ["The quick brown fox jumps over the lazy dog", "ab", PROMPT]
    params = SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=2)

    def with_budget(budget):
        with LLM(str(tiny_llm_dir()), **SMALL | dict(max_num_batched_tokens=budget)) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    whole, chunked = with_budget(64), with_budget(8)
    for prompt, one, many in zip(prompts, whole, chunked, strict=True):
        tokens = ids(prompt)
        oracle = log_softmax(oracle_logits(tokens))
        for output in (one, many):
            assert len(output.prompt_logprobs) == len(tokens)
            assert output.prompt_logprobs[0] is None
            for i in range(1, len(tokens)):
                check_position(output.prompt_logprobs[i], tokens[i], oracle[i - 1], 3)
        for a, b in zip(one.prompt_logprobs[1:], many.prompt_logprobs[1:], strict=True):
            assert list(a) == list(b)
            assert [x.rank for x in a.values()] == [x.rank for x in b.values()]
            np.testing.assert_allclose(
                [x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-5
            )
        assert one.outputs[0].token_ids == many.outputs[0].token_ids


# ---- several completions ---------------------------------------------------------------------------------------------


def test_several_seeded_completions_are_those_of_consecutive_seeds(llm):
    def sample(**fields):
        params = SamplingParams(
            temperature=1.2, top_p=0.9, max_tokens=10, ignore_eos=True, **fields
        )
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        return [completion.token_ids for completion in output.outputs]

    together = sample(n=3, seed=7)
    assert together == [sample(seed=seed)[0] for seed in (7, 8, 9)]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert sample(n=3, seed=7) == together
    unseeded = sample(n=3)
    assert len({tuple(tokens) for tokens in unseeded}) == 3
