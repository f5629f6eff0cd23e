"""Custom logits processors through `LLM` and the real executor, against the same rules in numpy over transformers' logits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, LogitsProcessor, SamplingParams
from jaxinfer.executor.sampler_features import all_features
from tests.tiny_llm import SMALL, VOCAB, ids, oracle_greedy, oracle_logits, tiny_llm_dir

PROMPTS = ["The lazy dog", "fox jumps", "a quick", "zebra"]
NUM_TOKENS = 10


def boost(logits, state):
    """Adds to one token."""
    token = state.parameters["token"].astype(jnp.int32)
    rows = jnp.arange(logits.shape[0])
    return logits.at[rows, token].add(state.parameters["by"])


def no_repeats(logits, state):
    """Bans what the output or the prompt holds, from the given length of the output on."""
    late = (state.num_output >= state.parameters["after"])[:, None]
    return jnp.where(late & ((state.counts > 0) | state.in_prompt), -jnp.inf, logits)


def halve(logits, state):
    return logits / 2


def everything(logits, state):
    return logits * 0 + 7.0


PROCESSORS = {
    "boost": LogitsProcessor(boost, {"token": None, "by": 100.0}),
    "no_repeats": LogitsProcessor(no_repeats, ["after"]),
    "halve": halve,
    "everything": everything,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), **SMALL, logits_processors=PROCESSORS) as llm:
        yield llm


def asked(temperature=0.0, max_tokens=NUM_TOKENS, **processors) -> SamplingParams:
    more = processors.pop("more", {})
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={"logits_processors": processors} if processors else None,
        **more,
    )


def boosted(token, by):
    def rule(logits, prompt, output):
        return logits + by * (np.arange(VOCAB) == token)

    return rule


def unrepeated(after):
    def rule(logits, prompt, output):
        if len(output) < after:
            return logits
        return np.where(np.isin(np.arange(VOCAB), prompt + output), -np.inf, logits)

    return rule


def test_rows_that_ask_are_changed_and_no_others(llm):
    params = [
        asked(no_repeats={"after": 3}),
        asked(),
        asked(boost={"token": 40, "by": 1.5}),
        asked(boost={"token": 40, "by": 1.5}, no_repeats={"after": 0}),
    ]
    both = boosted(40, 1.5), unrepeated(0)
    rules = [
        unrepeated(3),
        None,
        boosted(40, 1.5),
        lambda logits, *tokens: both[1](both[0](logits, *tokens), *tokens),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, rule, output in zip(PROMPTS, rules, outputs, strict=True):
        expected = oracle_greedy(ids(prompt), NUM_TOKENS, rule)
        assert output.outputs[0].token_ids == expected
    plain = oracle_greedy(ids(PROMPTS[0]), NUM_TOKENS)
    assert outputs[0].outputs[0].token_ids != plain, "the rule changes nothing here"


def test_registered_order_decides_not_the_requests(llm):
    """`halve` comes after `boost`: half of the bias counts, whatever order the request names them in."""
    logits = oracle_logits(ids("fox"))[-1]
    best, second = np.argsort(-logits)[:2].tolist()
    by = 1.5 * float(logits[best] - logits[second])
    params = [
        asked(max_tokens=1, halve=None, boost={"token": second, "by": by}, more=dict(logprobs=1)),
        asked(max_tokens=1, boost={"token": second}, everything={}),
    ]
    first, last = llm.generate(["fox", "fox"], params, use_tqdm=False)
    assert first.outputs[0].token_ids == [second], "scaling by a half leaves the order as it is"
    reported = first.outputs[0].logprobs[0][second].logprob
    total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    assert reported == pytest.approx(logits[second] - total, abs=1e-4), (
        "raw logprobs are the model's"
    )
    assert last.outputs[0].token_ids == [0], "the last one made all tokens equal"


def test_after_masks_and_before_temperature():
    """The processed logits that random rows are drawn from say what was done, and in which order."""
    with LLM(
        str(tiny_llm_dir()), **SMALL, logits_processors=PROCESSORS, logprobs_mode="processed_logits"
    ) as llm:
        allowed = list(range(10, 20))
        params = asked(
            temperature=0.5,
            max_tokens=1,
            boost={"token": 12, "by": 2.0},
            more=dict(allowed_token_ids=allowed, logit_bias={11: 1.0}, logprobs=20, seed=1),
        )
        everywhere = asked(
            temperature=0.5, max_tokens=1, everything=None, more=dict(allowed_token_ids=allowed)
        )
        output, flat = llm.generate(["fox", "fox"], [params, everywhere], use_tqdm=False)
    logits = oracle_logits(ids("fox"))[-1]
    expected = (logits + 1.0 * (np.arange(VOCAB) == 11) + 2.0 * (np.arange(VOCAB) == 12)) / 0.5
    (position,) = output.outputs[0].logprobs
    for token, entry in position.items():
        wanted = expected[token] if token in allowed else -np.inf
        assert entry.logprob == pytest.approx(wanted, abs=1e-3)
    assert flat.outputs[0].token_ids[0] in allowed, "what is masked stays so"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"logits_processors": {"bost": {}}}, "there is no logits processor 'bost'"),
        ({"logits_processors": {"boost": {"tokn": 1}}}, r"are \['by', 'token'\], got \['tokn'\]"),
        ({"logits_processors": {"boost": {}}}, "'token' must be given"),
        ({"logits_processors": {"boost": {"token": "a"}}}, "must be a finite number, got 'a'"),
        ({"logits_processors": {"boost": {"token": float("nan")}}}, "must be a finite number"),
        ({"logits_processors": ["boost"]}, "must map the names of processors"),
        ({"logits_processors": {"boost": 3}}, "must be a dict, got 3"),
        ({"other": 1}, r"may hold 'logits_processors' only, got \['other'\]"),
        ([], "extra_args must be a dict"),
    ],
)
def test_refused_requests(llm, extra, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("fox", SamplingParams(extra_args=extra), use_tqdm=False)
    assert llm.generate("fox", asked(max_tokens=1), use_tqdm=False)[0].finished


def test_a_warm_up_compiles_whatever_requests_can_need(llm):
    for params in (
        asked(max_tokens=2, boost={"token": 1}),
        asked(max_tokens=2, boost={"token": 1}, more=dict(logprobs=2, bad_words=["a"])),
        asked(max_tokens=2),
    ):
        llm.generate(["fox", "dog"], params, use_tqdm=False)
    programs = llm._client._core._executor.runner.programs
    warmed_up = {key for key, _ in programs._all_jobs()}
    used = {key for key in programs.cache._programs if key[0] == "sample"}
    assert used <= warmed_up and any(features.processors for _, _, features in used)


def test_an_engine_without_processors_has_no_more_programs():
    plain, more = all_features(20, VOCAB), all_features(20, VOCAB, processors=True)
    assert len(plain) == 6 and more[:6] == plain and len(more) == 8
    assert not any(features.processors for features in plain)
