"""What clients send and expect beside what the APIs' descriptions lead one to think."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from jaxinfer.server.args import ListenArgs
from jaxinfer.server.protocol.anthropic import MessagesRequest
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.protocol.completion import CompletionRequest
from jaxinfer.server.protocol.responses import ResponsesRequest
from tests.clients.live_server import live_server
from tests.server.scripted_server import TOKENIZER, ScriptedServer, calls_of, run
from tests.server.test_tools import AUTO, HELLO, TOOLS, allowed

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
PROMPT = "<|user|>hi<|end|><|assistant|>"
LEAST = {
    TEXT: (CompletionRequest, dict(prompt=PROMPT)),
    CHAT: (ChatCompletionRequest, dict(messages=HELLO)),
    "/v1/responses": (ResponsesRequest, dict(input="hi")),
    MESSAGES: (MessagesRequest, dict(messages=HELLO, max_tokens=5)),
}


@pytest.mark.parametrize("path", LEAST)
def test_null_is_as_if_it_were_not_there(path: str):
    kind, least = LEAST[path]

    async def use(server: ScriptedServer):
        nulls = dict.fromkeys(kind.model_fields.keys() - least.keys() | {"no_such_field"})
        await server.ok(path, **least, **nulls)

    run("fine", use)


def test_null_among_the_options_of_streams():
    async def use(server: ScriptedServer):
        return await server.events(
            CHAT, messages=HELLO, stream_options={"include_usage": True, "continuous_usage_stats": None}
        )  # fmt: skip

    assert run("fine", use)[-1]["usage"]["completion_tokens"] == 5


def told(*messages: dict[str, Any], **settings: Any) -> str:
    """What the template makes of messages between two of the user."""

    async def use(server: ScriptedServer):
        body = dict(messages=[*HELLO, *messages, *HELLO], max_tokens=1, return_token_ids=True)
        return (await server.ok(CHAT, **body))["prompt_token_ids"]

    text = TOKENIZER.decode(run("x", use, settings), skip_special_tokens=False)
    return text.removeprefix("<|user|>hi<|end|>").removesuffix(PROMPT)


SEES_NULLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.keys() | sort | join(',') }}<|end|>{% endfor %}<|assistant|>"


def test_a_message_as_clients_send_it_back():
    """All fields of the message, most of them null: templates ask whether there are calls."""
    message = openai.types.chat.ChatCompletionMessage(role="assistant", content="yes")
    sent = message.model_dump() | {"tool_calls": []}
    assert None in sent.values()
    assert "<|assistant|>yescontent,role<|end|>" in told(sent, chat_template=SEES_NULLS)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, "<|assistant|><|end|>"),
        ({"role": "assistant"}, "<|assistant|><|end|>"),
        ({"role": "tool", "tool_call_id": "1", "content": None}, "<|tool|><|end|>"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "<|assistant|>no<|end|>",
        ),
        ({"role": "developer", "content": "Be brief."}, "<|system|>Be brief.<|end|>"),
    ],
)
def test_messages_of_unusual_forms(message: dict[str, Any], text: str):
    assert told(message) == text


def test_a_template_that_knows_developers_gets_them():
    template = "{# developer #}{% for m in messages %}[{{ m.role }}]{% endfor %}<|assistant|>"
    message = {"role": "developer", "content": "Be brief."}
    assert told(message, chat_template=template) == "[user][developer][user]<|assistant|>"


def test_fields_that_ask_for_nothing():
    async def use(server: ScriptedServer):
        for fields in (dict(best_of=1), dict(best_of=2, n=2), dict(suffix="")):
            await server.ok(TEXT, prompt=PROMPT, **fields)
        assert (await server.refused(TEXT, prompt=PROMPT, best_of=3, n=2))["param"] == "best_of"
        for fields in (dict(mm_processor_kwargs={}), dict(prompt_cache_retention="24h")):
            await server.ok(CHAT, messages=HELLO, **fields)
        edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        secret = {"type": "redacted_thinking", "data": "x"}
        answered = [secret, {"type": "text", "text": "yes"}]
        turns = [*HELLO, {"role": "assistant", "content": answered}, *HELLO]
        await server.ok(MESSAGES, max_tokens=5, messages=turns, context_management=edits)

    run("fine", use)


def test_allowed_tools():
    """Those that aren't allowed are neither told nor callable."""
    names = [tool["function"]["name"] for tool in TOOLS]

    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, tools=TOOLS, max_tokens=1400)
        ids = await server.ok(
            CHAT, **body | {"max_tokens": 1}, tool_choice=allowed("auto", names[2]), return_token_ids=True
        )  # fmt: skip
        return TOKENIZER.decode(ids["prompt_token_ids"], False), [
            await server.message(**body, tool_choice=allowed("required", *names[1:]))
            for _ in range(4)
        ]

    prompt, choices = run(None, use, AUTO)
    assert f'"{names[2]}"' in prompt and f'"{names[0]}"' not in prompt
    called = {name for choice in choices for name, _ in calls_of(choice)}
    assert called and called <= set(names[1:])


def test_a_form_for_answers_does_not_matter_where_calls_are_demanded():
    async def use(server: ScriptedServer):
        body = dict(messages=HELLO, tools=TOOLS[2:], response_format={"type": "json_object"})
        return await server.message(**body, tool_choice="required", max_tokens=400)

    assert {name for name, _ in calls_of(run(None, use))} == {"now"}


def test_too_long_for_the_context_in_the_words_that_clients_look_for():
    """LiteLLM looks for the first words, LangChain for "prompt is too long", others for the code, and Claude Code for both
    of Anthropic's sentences."""
    long = [{"role": "user", "content": "a" * 3000}]

    async def use(server: ScriptedServer):
        return [
            await server.refused(CHAT, messages=long),
            await server.refused(TEXT, prompt="a" * 3000),
            await server.refused(CHAT, messages=HELLO, max_tokens=2048),
            (await server.post(MESSAGES, messages=long, max_tokens=5)).json(),
            (await server.post(MESSAGES, messages=HELLO, max_tokens=2048)).json(),
        ]

    chat, text, limit, prompt, total = run("x", use)
    for error in chat, text, limit:
        assert error["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 2048 tokens" in error["message"]
    assert "prompt is too long" in chat["message"] and "prompt is too long" in text["message"]
    assert [e["param"] for e in (chat, text, limit)] == ["messages", "prompt", "max_tokens"]
    assert prompt["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 3003 tokens > 2047 maximum",
    }
    assert total["error"]["message"].startswith(
        "input length and `max_tokens` exceed context limit: 5 + 2048 > 2048"
    )


def test_the_clients_exception_has_the_code():
    async def use(server: ScriptedServer):
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        session = httpx.AsyncClient(transport=transport, base_url="http://x")
        client = openai.AsyncOpenAI(
            base_url="http://x/v1", api_key="none", max_retries=0, http_client=session
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="scripted", prompt="a" * 3000)
        return caught.value

    error = run("x", use)
    assert error.code == "context_length_exceeded" and error.param == "prompt"
    assert error.body["type"] == "invalid_request_error"


def test_bodies_that_are_not_plain_json_are_refused_by_their_headers():
    body = json.dumps(dict(messages=HELLO)).encode()
    kind = {"content-type": "application/json"}

    async def use(server: ScriptedServer):
        async def post(content: bytes, headers: dict[str, str]) -> tuple[int, str]:
            answer = await server.http.post(CHAT, content=content, headers=headers)
            return answer.status_code, answer.text

        return [
            await post(gzip.compress(body), kind | {"content-encoding": "gzip"}),
            await post(body, {"content-type": "application/x-www-form-urlencoded"}),
            await post(body, {}),
            await post(body, {"content-type": "application/json; charset=utf-8"}),
            await post(b"{", kind),
        ]

    packed, form, none, plain, broken = run("x", use)
    assert packed[0] == 415 and "Content-Encoding 'gzip'" in packed[1]
    assert form[0] == none[0] == 415 and "application/x-www-form-urlencoded" in form[1]
    assert plain[0] == 200 and broken[0] == 400


def test_head_is_answered_as_get():
    async def use(server: ScriptedServer):
        paths = ("/health", "/v1/models", CHAT, "/nowhere")
        return [(await server.http.head(path)).status_code for path in paths]

    assert run("x", use) == [200, 200, 405, 404]


def test_tokenizer_info():
    async def use(server: ScriptedServer):
        return await server.http.get("/tokenizer_info")

    assert run("x", use).status_code == 404
    info = run("x", use, dict(enable_tokenizer_info_endpoint=True)).json()
    assert info["eos_token"] == "<|end|>" and "messages" in info["chat_template"]
    assert info["vocab_size"] == TOKENIZER.vocab_size


def test_connections_are_kept_as_long_as_said():
    """By default for longer than aiohttp's clients keep theirs, 15 s, httpx's 5 s, and most proxies 60 s."""
    assert ListenArgs().timeout_keep_alive > 60
    with live_server("x", dict(served_model_name=("m",)), timeout_keep_alive=1) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        sockets = set()
        for _ in range(2):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""
            sockets.add(connection.sock)
        [sock] = sockets
        begun = time.monotonic()
        assert sock.recv(1) == b""  # the server has closed it
        assert 0.5 < time.monotonic() - begun < 15
        connection.close()


def test_requests_sent_before_the_answers_are_read():
    """HTTP/1.1 pipelining."""
    with live_server("x", dict(served_model_name=("m",))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            one = f"GET /version HTTP/1.1\r\nHost: {host}\r\n"
            sock.sendall((f"{one}\r\n" * 3 + f"{one}Connection: close\r\n\r\n").encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'{"version"') == 4
