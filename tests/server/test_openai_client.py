"""The official client against a server process with SmolLM2: real weights, tokenizer and chat template."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from jaxinfer.server.args import DEV_MODE_VARIABLE
from tests.server.server_process import ServerProcess, server_process

pytestmark = pytest.mark.real

MODEL = "smol"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = dict(model=MODEL, temperature=0)


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    limits = [
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "256",
        "--warmup",
        "lazy",
    ]
    os.environ[DEV_MODE_VARIABLE] = "1"
    limits += ["--logits-processors", "tests.server.boost_processor:boost"]
    names = f"--served-model-name {MODEL} --api-key secret".split()
    with server_process(
        ["-m", "jaxinfer", "serve", str(smollm2_gguf), "--port", "0", *limits, *names]
    ) as server:
        del os.environ[DEV_MODE_VARIABLE]
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=300)


def test_models(client: openai.OpenAI):
    [model] = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL


def test_completion_streamed_and_whole(client: openai.OpenAI):
    fields = dict(prompt="The capital of France is", max_tokens=12, **GREEDY)
    whole = client.completions.create(**fields, logprobs=2)
    [choice] = whole.choices
    assert "Paris" in choice.text and choice.finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    logprobs = choice.logprobs
    assert logprobs is not None and "".join(logprobs.tokens) == choice.text
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert (
            value == max(top.values())
            and len(top) == 2
            and sum(map(math.exp, top.values())) <= 1.001
        )
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == choice.text
    assert chunks[-1].usage == whole.usage


def test_logprobs_of_given_tokens(client: openai.OpenAI):
    given = {"logprob_token_ids": [260, 7042], "return_tokens_as_token_ids": True}
    fields = dict(prompt="The capital of France is", max_tokens=3, **GREEDY, extra_body=given)
    logprobs = client.completions.create(**fields).choices[0].logprobs
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert set(top) == {token, "token_id:260", "token_id:7042"}
    messages = dict(messages=QUESTION, max_tokens=3, **GREEDY, extra_body=given)
    for entry in client.chat.completions.create(**messages).choices[0].logprobs.content:
        assert [top.token for top in entry.top_logprobs] == ["token_id:260", "token_id:7042"]
    streamed = client.completions.create(**fields, stream=True)
    assert [
        t for c in streamed if c.choices for t in c.choices[0].logprobs.tokens
    ] == logprobs.tokens


def test_a_logits_processor_of_ones_own(client: openai.OpenAI):
    def ask(extra):
        fields = dict(prompt="The capital of France is", max_tokens=3, **GREEDY)
        body = {"vllm_xargs": extra, "return_token_ids": True}
        return client.completions.create(**fields, extra_body=body).choices[0].token_ids

    assert ask({"logits_processors": {"boost": {"token": 260}}}) == [260] * 3
    assert ask({}) != [260] * 3
    with pytest.raises(openai.BadRequestError, match="no logits processor 'bost'") as caught:
        ask({"logits_processors": {"bost": {}}})
    assert caught.value.param == "vllm_xargs"


def test_several_prompts_and_seeded_samples(client: openai.OpenAI):
    fields = dict(model=MODEL, prompt=["Once upon a time", "def f(x):"], n=2, max_tokens=6, seed=5)
    first, second = (client.completions.create(**fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 4
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]


def test_scoring_a_prompt(client: openai.OpenAI):
    [choice] = client.completions.create(
        **GREEDY, prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
    ).choices
    assert choice.text == "The capital of France is Paris" and choice.logprobs is not None
    values = choice.logprobs.token_logprobs
    assert values[0] is None and all(value < 0 for value in values[1:])
    assert choice.logprobs.text_offset[-1] == choice.text.index(" Paris")


def test_chat_streamed_and_whole(client: openai.OpenAI):
    fields = dict(messages=QUESTION, max_completion_tokens=40, **GREEDY)
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    [choice] = whole.choices
    content = choice.message.content
    assert choice.message.role == "assistant" and content and "Paris" in content
    assert choice.finish_reason == "stop" and choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None and len(entries) == whole.usage.completion_tokens
    assert b"".join(bytes(e.bytes) for e in entries).decode().startswith(content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**fields, stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == content


def test_the_clients_stream_helper(client: openai.OpenAI):
    with client.chat.completions.stream(
        messages=QUESTION, max_completion_tokens=40, **GREEDY
    ) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert "Paris" in (final.choices[0].message.content or "")


def test_vllm_extras_through_extra_body(client: openai.OpenAI):
    answer = client.chat.completions.create(
        messages=QUESTION,
        max_tokens=5,
        extra_body={"top_k": 1, "min_tokens": 5, "return_token_ids": True},
        model=MODEL,
    )
    assert len(answer.choices[0].model_extra["token_ids"]) == 5
    assert answer.model_extra["prompt_token_ids"]


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    inhabitants_in_millions: int


def test_structured_outputs(client: openai.OpenAI):
    fields = dict(messages=QUESTION, max_completion_tokens=60, **GREEDY)
    parsed = client.chat.completions.parse(**fields, response_format=City).choices[0].message.parsed
    assert parsed is not None and parsed.name == "Paris"
    chunks = client.chat.completions.create(
        **fields, stream=True, extra_body={"structured_outputs": {"regex": "(Rome|Paris)!{3}"}}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in (
        "Rome!!!",
        "Paris!!!",
    )
    [choice] = client.completions.create(
        prompt="2 + 2 =", max_tokens=5, extra_body={"guided_choice": [" 4", " five"]}, **GREEDY
    ).choices
    assert choice.text == " 4" and choice.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(
            **fields,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "list", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
    assert caught.value.param == "response_format"


def test_beam_search(client: openai.OpenAI):
    fields = dict(prompt="The capital of France is", max_tokens=4, n=3, model=MODEL)
    beams = {"use_beam_search": True, "ignore_eos": True}
    found = client.completions.create(**fields, extra_body=beams)
    assert len({choice.text for choice in found.choices}) == 3
    assert found.usage.completion_tokens == 12 and found.usage.prompt_tokens > 0
    chat = dict(messages=QUESTION, max_tokens=4, n=2, model=MODEL)
    first, second = client.chat.completions.create(**chat, extra_body=beams).choices
    assert first.message.content != second.message.content
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields, extra_body=beams, stream=True)
    assert caught.value.param == "stream"


def test_a_timeout_is_an_error_that_is_not_tried_again(server: ServerProcess):
    sent: list[httpx.Request] = []
    http = httpx.Client(event_hooks={"request": [sent.append]})
    impatient = openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=3, http_client=http
    )
    fields = dict(prompt="Once", max_tokens=200, model=MODEL)
    body = {"timeout": 0.1, "ignore_eos": True}
    with pytest.raises(openai.InternalServerError, match=r"timeout of 0\.1 seconds") as caught:
        impatient.completions.create(**fields, extra_body=body)
    assert caught.value.status_code == 504 and len(sent) == 1
    with pytest.raises(openai.APIError, match=r"timeout of 0\.1 seconds"):
        for _ in impatient.completions.create(**fields, extra_body=body, stream=True):
            pass


def test_masks_that_leave_no_token_are_bad_requests(client: openai.OpenAI):
    fields = dict(prompt="Once", max_tokens=9, **GREEDY)
    body = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        client.completions.create(**fields, extra_body=body)
    with pytest.raises(openai.APIError, match="allowed_token_ids") as caught:
        for _ in client.completions.create(**fields, extra_body=body, stream=True):
            pass
    assert caught.value.body["code"] == 400


def test_asleep_and_awake(server: ServerProcess, client: openai.OpenAI):
    fields = dict(prompt="Water boils at", max_tokens=6, **GREEDY)
    before = client.completions.create(**fields).choices[0].text
    assert httpx.post(f"{server.url}/sleep?level=1", timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    with pytest.raises(openai.BadRequestError, match="sleeps"):
        client.completions.create(**fields)
    assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
    assert client.completions.create(**fields).choices[0].text == before
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200


def test_errors_are_the_clients_own(server: ServerProcess, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="x", **GREEDY | dict(temperature=-1))
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="prompt is too long: it has"):
        client.completions.create(prompt="word " * 300, **GREEDY)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_concurrent_answers_are_those_given_alone(server: ServerProcess, client: openai.OpenAI):
    prompts = ["One, two, three,", "The sky is", "Water boils at", "A dog is", "Paris is", "I am"]
    fields = dict(max_tokens=8, **GREEDY)
    alone = [client.completions.create(prompt=p, **fields).choices[0].text for p in prompts]

    async def all_at_once() -> list[str]:
        many = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        async with many:
            found = await asyncio.gather(
                *(many.completions.create(prompt=p, **fields) for p in prompts)
            )
        return [answer.choices[0].text for answer in found]

    assert asyncio.run(all_at_once()) == alone


def test_zz_a_killed_core_is_an_api_error(server: ServerProcess, client: openai.OpenAI):
    """The last test: it takes the engine away."""
    stream = client.completions.create(
        prompt="Once", max_tokens=200, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    next(iter(stream))
    os.kill(server.core_pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIError, match="killed by signal 9"):
        for _ in stream:
            pass
    assert time.monotonic() - killed < 2
    with pytest.raises(openai.InternalServerError):
        client.completions.create(prompt="x", **GREEDY)
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert server.stop() == 0
