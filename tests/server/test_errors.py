"""What is refused, and how: OpenAI's error body, a 4xx, and the field's name."""

from __future__ import annotations

import pytest

from tests.server.story_server import StoryServer, error_of, run

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS = [
    ("prompt", dict(prompt=None)),
    ("prompt", dict(prompt="")),
    ("prompt", dict(prompt=[])),
    ("prompt", dict(prompt=["a", 3])),
    ("prompt", dict(prompt=[True])),
    ("prompt", dict(prompt=[10_000])),
    ("prompt", dict(prompt=[-1])),
    ("prompt", dict(prompt="a" * 128)),
    ("max_tokens", dict(max_tokens=0)),
    ("max_tokens", dict(max_tokens=-1)),
    ("max_tokens", dict(max_tokens="many")),
    ("max_tokens", dict(max_tokens=128)),
    ("max_tokens", dict(max_tokens=10**30)),
    ("temperature", dict(temperature=-0.1)),
    ("temperature", dict(temperature=True)),
    ("top_p", dict(top_p=0)),
    ("top_p", dict(top_p=1.5)),
    ("top_k", dict(top_k=-2)),
    ("min_p", dict(min_p=2)),
    ("n", dict(n=0)),
    ("n", dict(n=129)),
    ("n", dict(n=2, temperature=0)),
    ("presence_penalty", dict(presence_penalty=3)),
    ("frequency_penalty", dict(frequency_penalty=-3)),
    ("repetition_penalty", dict(repetition_penalty=0)),
    ("seed", dict(seed=2**64)),
    ("stop", dict(stop=["a", ""])),
    ("stop", dict(stop=["a"] * 65)),
    ("stop_token_ids", dict(stop_token_ids=[99])),
    ("logit_bias", dict(logit_bias={"x": 1})),
    ("logit_bias", dict(logit_bias={"99": 1})),
    ("allowed_token_ids", dict(allowed_token_ids=[])),
    ("bad_words", dict(bad_words=[" "])),
    ("logprobs", dict(logprobs=-1)),
    ("logprobs", dict(logprobs=21)),
    ("prompt_logprobs", dict(prompt_logprobs=21)),
    ("prompt_logprobs", dict(prompt_logprobs=1, stream=True)),
    ("min_tokens", dict(min_tokens=5, max_tokens=4)),
    ("stream_options", dict(stream_options={"include_usage": True})),
    ("truncate_prompt_tokens", dict(truncate_prompt_tokens=0)),
    ("cache_salt", dict(cache_salt="")),
    ("suffix", dict(suffix="x")),
    ("best_of", dict(best_of=2)),
    ("length_penalty", dict(length_penalty=2)),
    ("logprob_token_ids", dict(logprob_token_ids=[99])),
    ("vllm_xargs", dict(vllm_xargs={"logits_processors": {"x": {}}})),
    ("response_format", dict(response_format={"type": "yaml"})),
    (
        "response_format",
        dict(response_format={"type": "json_schema", "json_schema": {"schema": 1}}),
    ),
    ("response_format", dict(response_format={"type": "json_object"}, guided_regex="a")),
    (
        "response_format",
        dict(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "#"}},
            }
        ),
    ),
    ("structured_outputs", dict(structured_outputs={"regex": "a("})),
    ("structured_outputs", dict(structured_outputs={"regex": "a", "choice": ["b"]})),
    ("structured_outputs", dict(structured_outputs={"no_such_field": 1})),
    ("guided_json", dict(guided_json={"uniqueItems": True})),
    ("guided_grammar", dict(guided_grammar="start: x")),
    ("kv_transfer_params", dict(kv_transfer_params={"a": 1})),
]


def test_bad_completions_name_the_field():
    async def use(server: StoryServer):
        for param, fields in BAD_COMPLETIONS:
            error = await server.refused(TEXT, **dict(prompt="once") | fields)
            assert error["param"] == param, (fields, error)
            assert error["type"] == "invalid_request_error"
        assert server.executor.plans == [] and server.llm.num_unfinished == 0

    run(use)


def test_bad_chats_name_the_field():
    cases = [
        ("messages", dict(messages=[])),
        ("messages", dict(messages="hi")),
        ("messages", dict(messages=[{"content": "hi"}])),
        ("messages", dict(messages=[{"role": "user"}])),
        ("messages", dict(messages=[{"role": "user", "content": 3}])),
        ("messages", dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
        ("messages", dict(messages=[{"role": "user", "content": "a" * 128}])),
        ("max_tokens", dict(max_tokens=0)),
        ("max_completion_tokens", dict(max_completion_tokens=128)),
        ("top_logprobs", dict(top_logprobs=2)),
        ("top_logprobs", dict(top_logprobs=-1, logprobs=True)),
        ("top_logprobs", dict(top_logprobs=21, logprobs=True)),
        ("tools", dict(tools=[{"type": "function"}])),
        ("continue_final_message", dict(continue_final_message=True)),
        ("chat_template", dict(chat_template="x")),
        ("chat_template_kwargs", dict(chat_template_kwargs={"messages": []})),
        ("response_format", dict(response_format={"type": "json_schema", "json_schema": {}})),
    ]

    async def use(server: StoryServer):
        for param, fields in cases:
            error = await server.refused(CHAT, **dict(messages=HELLO) | fields)
            assert error["param"] == param, (fields, error)
        assert server.executor.plans == []

    run(use)


def test_neutral_values_of_what_is_missing_and_unknown_fields_are_accepted(caplog):
    async def use(server: StoryServer):
        neutral = dict(
            suffix=None,
            best_of=None,
            use_beam_search=False,
            length_penalty=1.0,
            response_format={"type": "text"},
            user="me",
            no_such_field=1,
        )
        await server.ok(TEXT, prompt="once", **neutral)
        await server.ok(TEXT, prompt="once", no_such_field=2)
        await server.ok(CHAT, messages=HELLO, tools=[], tool_choice="none", store=False)

    run(use)
    assert [r.getMessage() for r in caplog.records if "no_such_field" in r.getMessage()] == [
        "The field 'no_such_field' of a request is unknown, and ignored."
    ]


BODIES = {
    "no JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "1 MB of brackets": b'{"prompt": ' + b"[" * 1_000_000,
    "1 MB of nested lists": b'{"prompt": "a", "x": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "top_p": Infinity}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a huge integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_broken_bodies_are_refused(path):
    async def use(server: StoryServer):
        for what, body in BODIES.items():
            response = await server.http.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            is_fine = path == "/tokenize" and what in ("NaN", "infinity")
            assert response.status_code == (200 if is_fine else 400), (what, response.text)
            assert is_fine or error_of(response)
        await server.ok(TEXT, prompt="once")

    run(use)


def test_bodies_over_the_limit():
    async def chunks():
        for _ in range(100):
            yield b" " * 100

    async def use(server: StoryServer):
        headers = {"content-type": "application/json"}
        for content in (b" " * 2000, chunks()):
            response = await server.http.post(TEXT, content=content, headers=headers)
            assert response.status_code == 413
            error_of(response)

    run(use, dict(max_body_bytes=1000))


def test_unknown_models_paths_and_methods():
    async def use(server: StoryServer):
        for path, body in (
            (TEXT, dict(prompt="a")),
            (CHAT, dict(messages=HELLO)),
            ("/tokenize", dict(prompt="a")),
            ("/detokenize", dict(tokens=[1])),
        ):
            await server.refused(path, 404, model="\ud800", **body)
            error = await server.refused(path, 404, model="gpt-4", **body)
            assert "gpt-4" in error["message"] and error["param"] == "model"
        await server.ok(TEXT, prompt="a", model="tale")
        assert error_of(await server.http.get("/v1/nothing"))["code"] == 404
        assert error_of(await server.http.get(TEXT))["code"] == 405
        assert error_of(await server.http.get("/v1/models/gpt-4"))["code"] == 404

    run(use)


def test_api_keys_guard_v1_and_nothing_else():
    async def use(server: StoryServer):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer fïrst".encode()},
        ):
            for path in ("/v1/models", "/v1/nothing", "//v1/models"):
                response = await server.http.get(path, headers=headers)
                assert response.status_code == (404 if path.startswith("//") else 401)
                error_of(response)
        for key in ("first", "second"):
            response = await server.http.get(
                "/v1/models", headers={"authorization": f"Bearer {key}"}
            )
            assert response.status_code == 200
        for path in ("/health", "/metrics", "/version", "/load"):
            assert (await server.http.get(path)).status_code == 200

    run(use, dict(api_key=("first", "second")))


def test_api_keys_guard_v1_under_a_root_path_too():
    async def use(server: StoryServer):
        for path in ("/v1/models", "/api/v1/models", "/api/v1/models/story"):
            assert (await server.http.get(path)).status_code == 401
            response = await server.http.get(path, headers={"authorization": "Bearer k"})
            assert response.status_code == 200
        assert (await server.http.get("/api/health")).status_code == 200

    run(use, dict(api_key=("k",)), root_path="/api")


def test_a_dead_engine_is_unavailable():
    async def use(server: StoryServer):
        server.executor.is_invalid = lambda context: 1 // 0 == 0
        failed = await server.post(TEXT, prompt="once")
        assert failed.status_code == 500 and "ZeroDivisionError" in error_of(failed)["message"]
        for response in (
            await server.http.get("/health"),
            await server.http.get("/ping"),
            await server.post(TEXT, prompt="once"),
            await server.post(CHAT, messages=HELLO, stream=True),
        ):
            assert response.status_code == 503
            error_of(response)
        assert (await server.http.get("/metrics")).status_code == 200

    run(use)


def test_a_full_queue_asks_to_come_back():
    async def use(server: StoryServer):
        response = await server.post(TEXT, prompt="once", n=4)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        error_of(response)
        await server.ok(TEXT, prompt="once", n=3)

    run(use, dict(max_num_queued_reqs=1), max_num_seqs=2)
