"""Vectors over HTTP, with the official client of OpenAI, over a tiny encoder."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from functools import cache

import httpx
import msgspec
import numpy as np
import openai
import pytest

from jaxinfer import AsyncLLM, PoolingParams
from jaxinfer.engine.ipc import Outputs, Ready
from jaxinfer.engine.messages import EngineCoreOutputs, Pooled
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import build_engine
from jaxinfer.server.app import build_app
from jaxinfer.server.run_batch import run_batch
from jaxinfer.server.settings import ServerSettings
from tests.server.story_server import error_of, story_server
from tests.tiny_encoders import MAX_LEN, TOKENIZER, class_logits, hidden_states, tiny_encoder

CLOSE = dict(rtol=0, atol=1e-4)


@cache
def _engine(suffix: str, num_labels: int | None, config: tuple):
    more = {} if num_labels is None else dict(num_labels=num_labels)
    path = tiny_encoder("Bert", suffix, **more, **dict(config))
    args = EngineArgs(str(path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=48)
    return build_engine(args), path


@asynccontextmanager
async def server(suffix="Model", num_labels=None, **config):
    engine, path = _engine(suffix, num_labels, tuple(config.items()))
    llm = AsyncLLM.from_engine(engine)
    app = build_app(llm, ServerSettings(served_model_name=("tiny", "alias")))
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http, llm, path
    finally:
        # The engine is the module's: only its thread ends.
        await asyncio.to_thread(engine_thread_end, llm)


def engine_thread_end(llm: AsyncLLM) -> None:
    core = llm._client._core
    shutdown, core.shutdown = core.shutdown, lambda: None
    llm.shutdown()
    core.shutdown = shutdown


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def run(use, *args, **kwargs):
    async def main():
        async with server(*args, **kwargs) as (http, llm, path):
            return await use(http, llm, path)

    return asyncio.run(main())


async def ok(http, path, **body):
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http, path, status=400, **body):
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return error_of(response)


def test_the_client_of_openai_gets_embeddings_as_numbers_and_in_base64():
    texts = ["hello", "three words"]

    async def use(http, llm, path):
        client = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http)
        found = [
            await client.embeddings.create(model="tiny", input=given, **more)
            for given, more in (
                (texts, {}),  # the client asks for base64 by itself
                (texts, dict(encoding_format="float")),
                ([TOKENIZER(text)["input_ids"] for text in texts], {}),
                (texts[0], {}),
                (TOKENIZER(texts[0])["input_ids"], {}),
            )
        ]
        return path, found

    path, found = run(use)
    expected = [unit(hidden_states(path, text)[0]) for text in texts]
    for response in found[:3]:
        assert [e.index for e in response.data] == [0, 1] and response.model == "tiny"
        np.testing.assert_allclose([e.embedding for e in response.data], expected, **CLOSE)
        assert response.usage.prompt_tokens == response.usage.total_tokens == 7 + 13
    for response in found[3:]:
        np.testing.assert_allclose(response.data[0].embedding, expected[0], **CLOSE)


def test_base64_is_of_float32_and_options_have_their_effect():
    async def use(http, llm, path):
        raw = await ok(http, "/v1/embeddings", input="hello", normalize=False)
        coded = await ok(
            http, "/v1/embeddings", input="hello", encoding_format="base64", dimensions=8
        )
        cut = await ok(http, "/v1/embeddings", input="y" * 99, truncate_prompt_tokens=-1)
        every = await ok(http, "/pooling", input=["hello", "b c"], task="token_embed")
        usual = await ok(http, "/pooling", input="hello", model="alias")
        return path, raw, coded, cut, every, usual

    path, raw, coded, cut, every, usual = run(use, is_matryoshka=True)
    states = hidden_states(path, "hello")
    np.testing.assert_allclose(raw["data"][0]["embedding"], states[0], **CLOSE)
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, unit(states[0][:8]), **CLOSE)
    assert cut["usage"]["prompt_tokens"] == MAX_LEN
    np.testing.assert_allclose(every["data"][0]["data"], states, **CLOSE)
    assert every["data"][1]["object"] == "pooling" and len(every["data"][1]["data"]) == 5
    np.testing.assert_allclose(usual["data"][0]["data"], unit(states[0]), **CLOSE)
    assert usual["model"] == "alias"


def test_classes_have_labels_and_probabilities():
    async def use(http, llm, path):
        body = await ok(http, "/classify", input=["hello", "b c"])
        error = await refused(http, "/v1/embeddings", input="hello")
        return path, body, error

    path, body, error = run(use, "ForSequenceClassification", 3)
    for entry, text in zip(body["data"], ["hello", "b c"], strict=True):
        exp = np.exp(class_logits(path, text))
        np.testing.assert_allclose(entry["probs"], exp / exp.sum(), **CLOSE)
        assert entry["label"] == f"LABEL_{exp.argmax()}" and entry["num_classes"] == 3
    assert "'embed' is not what the model" in error["message"]


def test_bad_input_names_its_field_and_the_engine_goes_on():
    async def use(http, llm, path):
        for body, param, text in (
            (dict(input=""), "input", "empty"),
            (dict(input=[]), "input", "empty"),
            (dict(input=["a", ""]), "input", "empty"),
            (dict(input=[[]]), "input", "empty"),
            (dict(input=[VERY_LARGE]), "input", str(VERY_LARGE)),
            (dict(), "input", "One of input and messages"),
            (dict(input="y" * 99), "input", f"max_model_len is {MAX_LEN}"),
            (dict(input="a", truncate_prompt_tokens=99), "truncate_prompt_tokens", str(MAX_LEN)),
            (dict(input="a", dimensions=8), "dimensions", "Matryoshka"),
            (dict(input="a", dimensions=0), "dimensions", "at least 1"),
            (dict(input="a", encoding_format="hex"), "encoding_format", "base64"),
            (dict(input=["a"] * 2049), "input", "2048"),
            (dict(messages=[{"role": "user", "content": "hi"}]), "messages", "chat template"),
        ):
            error = await refused(http, "/v1/embeddings", **body)
            assert error["param"] == param and text in error["message"], error
        error = await refused(http, "/v1/embeddings", 404, input="a", model="other")
        assert error["param"] == "model"
        for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            response = await http.post(route, json={"prompt": "a"})
            assert response.status_code == 404 and "makes vectors: embed" in response.text
        error = await refused(http, "/classify", input="a")
        assert "embed, token_embed" in error["message"]
        await ok(http, "/v1/embeddings", input="a", unknown_field=1)

    run(use)


VERY_LARGE = 10**6


def test_scores_and_ranks_of_a_cross_encoder():
    documents = ["hello", "three words", "x" * 40, "a"]

    async def use(http, llm, path):
        bodies = [
            await ok(http, route, **fields)
            for route, fields in (
                ("/score", dict(text_1="query", text_2=documents)),
                ("/v1/score", dict(queries="query", documents=documents)),
                ("/v1/score", dict(data_1=["query"] * 4, data_2=documents, use_activation=False)),
            )
        ]
        ranked = [
            await ok(http, route, query="query", documents=documents, **fields)
            for route, fields in (
                ("/rerank", {}),
                ("/v1/rerank", dict(top_n=2)),
                ("/v2/rerank", dict(return_documents=False, model="alias")),
            )
        ]
        mixed = await ok(
            http, "/rerank", query="query", documents=["hello", {"text": "a"}], top_n=9
        )
        for route, body, param in (
            ("/score", dict(text_1=["a", "b"], text_2=["c"] * 3), "data_1"),
            ("/score", dict(text_1="a", text_2=[]), "data_2"),
            ("/score", dict(text_1="a"), "data_2"),
            ("/rerank", dict(query="", documents=["a"]), "query"),
            ("/rerank", dict(query="a", documents=[]), "documents"),
            ("/rerank", dict(query="a", documents=["y" * 99]), "documents"),
            ("/rerank", dict(query="a", documents=["b"], top_n=-1), "top_n"),
        ):
            error = await refused(http, route, **body)
            assert error["param"] == param, error
        return path, bodies, ranked, mixed

    path, bodies, ranked, mixed = run(use, "ForSequenceClassification", 1)
    logits = np.array([class_logits(path, "query", text)[0] for text in documents])
    expected = 1 / (1 + np.exp(-logits))
    for body, values in zip(bodies, (expected, expected, logits), strict=True):
        np.testing.assert_allclose([d["score"] for d in body["data"]], values, **CLOSE)
        assert body["usage"]["total_tokens"] == sum(len(text) + 8 for text in documents)
    order = np.argsort(-expected).tolist()
    assert [r["index"] for r in ranked[0]["results"]] == order
    for result in ranked[0]["results"]:
        assert abs(result["relevance_score"] - expected[result["index"]]) < 1e-4
        assert result["document"] == {"text": documents[result["index"]]}
    assert [r["index"] for r in ranked[1]["results"]] == order[:2]
    assert "document" not in ranked[2]["results"][0] and ranked[2]["model"] == "alias"
    assert {r["document"]["text"] for r in mixed["results"]} == {"hello", "a"}


def test_scores_of_embeddings_are_their_cosine():
    texts = ["hello", "three words", "b c"]

    async def use(http, llm, path):
        body = await ok(http, "/score", data_1=texts[0], data_2=texts)
        return path, [entry["score"] for entry in body["data"]]

    path, found = run(use)
    vectors = [unit(hidden_states(path, text)[0]) for text in texts]
    np.testing.assert_allclose(found, [vectors[0] @ v for v in vectors], **CLOSE)


def test_a_batch_file_may_ask_for_vectors(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        dict(custom_id="a", url="/v1/embeddings", body=dict(input="hello")),
        dict(custom_id="b", url="/v1/score", body=dict(data_1="hello", data_2=["hello"])),
        dict(custom_id="c", url="/v1/completions", body=dict(prompt="hello")),
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))

    async def use(http, llm, path):
        return path, await run_batch(llm, ServerSettings(("tiny",)), source, target)

    path, counts = run(use)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    bodies = {answer["custom_id"]: answer["response"] for answer in answers}
    assert (counts.num_requests, counts.num_failed, bodies["c"]["status_code"]) == (3, 1, 404)
    expected = unit(hidden_states(path, "hello")[0])
    np.testing.assert_allclose(bodies["a"]["body"]["data"][0]["embedding"], expected, **CLOSE)
    assert abs(bodies["b"]["body"]["data"][0]["score"] - 1) < 1e-6


def test_what_crosses_to_another_process_comes_back_the_same():
    config = _engine("ForSequenceClassification", 3, ())[0].config
    pooled = EngineCoreOutputs(pooled={"r": Pooled([2, 1], b"12345678")})
    for message in (Ready(config, 5), Outputs(pooled)):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Ready | Outputs)
        assert again == message


def test_an_engine_that_writes_has_no_vectors():
    async def use():
        async with story_server() as story:
            for route, body in (
                ("/v1/embeddings", dict(input="a")),
                ("/pooling", dict(input="a")),
                ("/classify", dict(input="a")),
                ("/score", dict(text_1="a", text_2="b")),
                ("/v2/rerank", dict(query="a", documents=["b"])),
            ):
                error = await story.refused(route, 404, **body)
                assert "runner='pooling'" in error["message"]

    asyncio.run(use())


def test_many_requests_at_once_from_python():
    texts = ["hello", "three words", "x" * 40, "a"] * 5

    async def use(http, llm, path):
        async def one(text):
            async for output in llm.encode(text, PoolingParams(use_activation=False)):
                return output.outputs.data

        with pytest.raises(ValueError, match="makes vectors"):
            async for _ in llm.generate("a"):
                pass
        return path, await asyncio.gather(*map(one, texts))

    path, found = run(use)
    for text, data in zip(texts, found, strict=True):
        np.testing.assert_allclose(data, hidden_states(path, text)[0], **CLOSE)
