from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

import jaxinfer
from tests.frontend.story_engine import TOKENIZER
from tests.server.story_server import StoryServer, run

TEXT = "/v1/completions"


def test_models_version_health_and_load():
    async def use(server: StoryServer):
        models = (await server.http.get("/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["story", "tale"]
        assert models["object"] == "list" and models["data"][0]["max_model_len"] == 128
        assert (await server.http.get("/v1/models/tale")).json() == models["data"][1]
        assert (await server.http.get("/version")).json() == {"version": jaxinfer.__version__}
        for path in ("/health", "/ping"):
            response = await server.http.get(path)
            assert response.status_code == 200 and response.content == b""
        assert (await server.http.get("/load")).json() == {"server_load": 0}

    run(use)


def test_tokenize_and_detokenize():
    async def use(server: StoryServer):
        ids = TOKENIZER.encode("once upon")
        body = await server.ok("/tokenize", prompt="once upon", return_token_strs=True)
        assert body == {
            "count": 9,
            "max_model_len": 128,
            "tokens": ids,
            "token_strs": ["o", "n", "c", "e", "Ġ", "u", "p", "o", "n"],
        }
        assert await server.ok("/detokenize", tokens=ids) == {"prompt": "once upon"}
        assert (await server.refused("/detokenize", tokens=[99]))["param"] == "tokens"
        assert (await server.refused("/tokenize"))["type"] == "invalid_request_error"

    run(use)


def test_request_ids_and_cross_origin_headers():
    async def use(server: StoryServer):
        given = await server.http.post(
            TEXT, json=dict(prompt="a"), headers={"x-request-id": "mine", "origin": "http://x"}
        )
        assert given.headers["x-request-id"] == "mine" and given.json()["id"] == "cmpl-mine"
        assert given.headers["access-control-allow-origin"] == "*"
        made = await server.http.post(TEXT, json=dict(prompt="a", request_id="yours"))
        plain = await server.http.post(TEXT, json=dict(prompt="a"))
        assert plain.json()["id"] == "cmpl-" + plain.headers["x-request-id"]
        assert made.headers["x-request-id"] and made.json()["id"] == "cmpl-yours"

    run(use, dict(enable_request_id_headers=True))


def test_metrics_count_what_happened():
    async def use(server: StoryServer):
        await server.ok(TEXT, prompt="once", max_tokens=8)
        await server.ok(TEXT, prompt=["a", "ab"], n=2, max_tokens=30, stop="pon")
        await server.events(TEXT, prompt="abc", max_tokens=5)
        await server.refused(TEXT, prompt="once", max_tokens=0)
        await server.until_idle()
        return (await server.http.get("/metrics")).text

    text = run(use)
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("jaxinfer:"):
                assert labels.pop("model_name") == "story" and labels.pop("engine") == "0"
            if "le" not in labels:
                name = sample.name + labels.get("finished_reason", "")
                values[name.removeprefix("jaxinfer:")] = sample.value
            elif labels["le"] == "+Inf":
                values[sample.name.removeprefix("jaxinfer:")] = sample.value
    assert values["request_success_totallength"] == 2
    assert values["request_success_totalstop"] == 4
    assert values["request_success_totalabort"] == values["request_success_totalerror"] == 0
    assert values["prompt_tokens_total"] == 4 + 1 + 2 + 3
    assert values["time_to_first_token_seconds_count"] == 6
    assert values["e2e_request_latency_seconds_count"] == 4
    assert values["request_prompt_tokens_sum"] == 10
    assert values["request_params_n_sum"] == 1 + 2 + 2 + 1
    # The core is a step or two ahead when a stop string is found.
    tokens = values["generation_tokens_total"]
    assert tokens >= values["request_generation_tokens_sum"] >= 8 + 5
    assert values["inter_token_latency_seconds_count"] <= tokens - 6
    assert values["iteration_tokens_total_sum"] >= 10
    assert values["prompt_tokens_cached_total"] == 0
    assert values["request_prefill_kv_computed_tokens_sum"] == 10
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert values[name] == 0
    assert values["num_compilations"] == 0 and values["engine_up"] == 1
    assert values["cache_config_info"] == 1 and 'num_gpu_blocks="400"' in text


def test_the_schema_describes_the_endpoints():
    async def use(server: StoryServer):
        return (await server.http.get("/openapi.json")).json()

    schema = run(use)
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "top_k", "chat_template_kwargs"} <= set(fields)
    assert (
        run(lambda s: s.http.get("/openapi.json"), dict(disable_fastapi_docs=True)).status_code
        == 404
    )
