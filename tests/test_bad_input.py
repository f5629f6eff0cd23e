"""Bad input through the public API, over the real executor: a clear error, and the same engine serves on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, EngineArgs, RequestFailedError, SamplingParams
from jaxinfer.engine_factory import build_engine
from tests.tiny_llm import (
    MAX_LEN,
    SMALL,
    VOCAB,
    copy_of_tiny_llm,
    ids,
    oracle_greedy,
    tiny_llm_dir,
)

GOOD = ["The quick brown fox", "jumps over", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_llm_dir()), **SMALL) as llm:
        yield llm


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def expected() -> list[list[int]]:
    return [oracle_greedy(ids(prompt), GREEDY.max_tokens) for prompt in GOOD]


def check_serves(llm: LLM) -> None:
    assert [o.outputs[0].token_ids for o in generate(llm, GOOD)] == expected()


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([5] * MAX_LEN, {}, f"has {MAX_LEN} tokens; max_model_len is {MAX_LEN}.* at most {MAX_LEN - 1}"),
        ("x" * 500, {}, f"has 500 tokens; max_model_len is {MAX_LEN}"),
        ("", {}, "prompt must not be empty"),
        ([[]], {}, "prompt must not be empty"),
        ({"prompt_token_ids": []}, {}, "prompt must not be empty"),
        ([5, VOCAB], {}, rf"prompt_token_ids must be in \[0, {VOCAB - 1}\].* got {VOCAB}"),
        ([-1], {}, rf"prompt_token_ids must be in \[0, {VOCAB - 1}\].* got -1"),
        ("x", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ("x", {"max_tokens": -5}, "max_tokens must be at least 1, got -5"),
        ("x", {"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ("x", {"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ("x", {"top_k": -2}, "top_k must be at least -1, got -2"),
        ("x", {"min_p": -0.5}, r"min_p must be in \[0, 1\], got -0.5"),
        ("x", {"temperature": -1}, "temperature must be at least 0, got -1"),
        ("x", {"n": 0}, "n must be at least 1, got 0"),
        ("x", {"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ("x", {"logprobs": -2}, "logprobs must be at least -1, got -2"),
        ("x", {"logit_bias": {VOCAB: 1.0}}, rf"logit_bias .* {VOCAB}, .*\[0, {VOCAB - 1}\]"),
        ("x", {"stop_token_ids": [VOCAB]}, rf"stop_token_ids .* {VOCAB}, .*\[0, {VOCAB - 1}\]"),
        ("x", {"allowed_token_ids": [VOCAB]}, rf"allowed_token_ids .* {VOCAB}, "),
    ],
)  # fmt: skip
def test_a_refused_request_says_what_is_wrong_and_the_engine_serves_on(
    llm, prompt, fields, message
):
    with pytest.raises(ValueError, match=message):
        generate(llm, prompt, SamplingParams(**fields))
    check_serves(llm)


def test_one_bad_prompt_of_a_batch_is_named_and_none_of_it_runs(llm):
    for bad, message in (([5, VOCAB], "prompt_token_ids"), ([5] * MAX_LEN, "max_model_len")):
        with pytest.raises(ValueError, match=f"^prompt 2: .*{message}"):
            generate(llm, [*GOOD[:2], bad, GOOD[2]])
        check_serves(llm)


def test_a_prompt_one_token_short_of_max_model_len_gets_one_token(llm):
    prompt = [3 + i % 90 for i in range(MAX_LEN - 1)]
    (output,) = generate(llm, prompt)
    assert output.outputs[0].token_ids == oracle_greedy(prompt, 1)
    assert output.outputs[0].finish_reason == "length"


def test_rules_that_leave_no_token_fail_that_request_alone(llm):
    nothing = SamplingParams(temperature=0, allowed_token_ids=ids("a"), bad_words=["a"])
    with pytest.raises(RequestFailedError, match=r"1 of 3 .* prompt 1: No token may be") as caught:
        generate(llm, GOOD, [GREEDY, nothing, GREEDY])
    found = [output.outputs[0].token_ids for output in caught.value.outputs]
    assert [found[0], found[2]] == [expected()[0], expected()[2]]
    check_serves(llm)


# ---- NaN logits ------------------------------------------------------------------------------------------------------


def test_nan_logits_fail_the_request_that_meets_them_and_nobody_else(tmp_path):
    used = {token for tokens in expected() for token in tokens} | set(ids("".join(GOOD)))
    poison = next(token for token in range(3, VOCAB) if token not in used)
    directory = copy_of_tiny_llm(tmp_path / "model")
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][poison] = np.nan
    save_file(tensors, file)

    engine = build_engine(EngineArgs(str(directory), **SMALL))
    pool = engine.core.scheduler.kv.pool
    num_blocks = pool.num_free
    samples_it = SamplingParams(temperature=0, max_tokens=8, logit_bias={poison: 100})
    with LLM.from_engine(engine) as llm:
        for bad, params, num_tokens in (
            ([5, poison, 7, 8], GREEDY, 0),
            ([*range(3, 20), poison], GREEDY, 0),
            (ids("fine until it samples"), samples_it, 1),
        ):
            with pytest.raises(RequestFailedError, match=r"1 of 3 .* prompt 1: NaN") as caught:
                generate(llm, [GOOD[0], bad, GOOD[1]], [GREEDY, params, GREEDY])
            first, failed, last = (output.outputs[0] for output in caught.value.outputs)
            assert failed.finish_reason == "error" and failed.token_ids == [poison] * num_tokens
            assert [first.token_ids, last.token_ids] == expected()[:2]
            assert pool.num_free == num_blocks
            # Blocks are reused in the order of their freeing: so many requests go through all of them.
            again = 6
            assert (
                again * sum(len(prompt) + 8 for prompt in GOOD) > num_blocks * SMALL["block_size"]
            )
            found = [output.outputs[0].token_ids for output in generate(llm, GOOD * again)]
            assert found == expected() * again


# ---- models ----------------------------------------------------------------------------------------------------------


def change_config(**changes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        (file,) = directory.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


def cut_weights(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            change_config(architectures=["XLNetLMHeadModel"]),
            "architecture XLNetLMHeadModel is not supported; supported: .*LlamaForCausalLM",
        ),
        (cut_weights, r"model\.safetensors is cut short: tensor model\.norm\.weight"),
        (
            change_tensors(lambda tensors: tensors.pop(DOWN)),
            rf"/model lacks tensor {DOWN}",
        ),
        (
            change_tensors(lambda tensors: tensors.update(extra=np.zeros(3, np.float32))),
            r"model\.safetensors holds tensor extra",
        ),
        (
            change_tensors(lambda tensors: tensors.update({DOWN: tensors[DOWN][:, :-1].copy()})),
            rf"Tensor {DOWN} in .*model\.safetensors has shape \(48, 49\).* \(48, 50\)",
        ),
        (lambda directory: (directory / "config.json").write_text("{"), r"config\.json"),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), r"tokenizer\.json"),
        (lambda directory: (directory / "config.json").unlink(), "neither a config.json"),
    ],
    ids=[
        "architecture",
        "truncated",
        "missing",
        "unexpected",
        "shape",
        "config",
        "tokenizer",
        "no config",
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(tmp_path, damage, message):
    directory = copy_of_tiny_llm(tmp_path / "model")
    damage(directory)
    with pytest.raises(ValueError, match=message):
        LLM(str(directory), **SMALL)


def test_an_unknown_model_id_says_where_it_was_looked_for():
    with pytest.raises(ValueError, match=r"Model 'nobody/no-such-model' was not found\. Tried: "):
        LLM("nobody/no-such-model")


@pytest.mark.parametrize(
    ("cache", "there_are"),
    [({"num_gpu_blocks_override": 12}, 11), ({"kv_cache_memory_bytes": 1000}, 0)],
)
def test_a_cache_too_small_for_one_request_says_how_many_blocks_it_takes(cache, there_are):
    with pytest.raises(ValueError, match=rf"needs 12 blocks .* there are {there_are} ") as e:
        LLM(str(tiny_llm_dir()), **SMALL, **cache)
    if there_are:
        assert "Decrease max_model_len to at most 44" in str(e.value)
    else:
        assert "max_model_len to at most" not in str(e.value)
    for remedy in ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
        assert remedy in str(e.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 1000}, r"max_model_len is 1000, .* end at \d+"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"max_num_batched_tokens \(4\)"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_engine_arguments_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_llm_dir()), **SMALL | fields)
