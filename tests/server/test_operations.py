"""What operators ask for: timeouts, middleware, a log of requests, the routes of the development mode."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from tests.frontend.story_engine import continuation
from tests.server import story_server as stories
from tests.server.story_server import StoryServer, parse_events, run

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def stalled(server: StoryServer) -> threading.Event:
    """The device stops after a few tokens, until the event is set."""
    gate, tell = threading.Event(), server.executor.next_token

    def next_token(context):
        if len(context) >= 8:
            gate.wait(stories.LIMIT)
        return tell(context)

    server.executor.next_token = next_token
    return gate


@pytest.mark.parametrize("how", ["field", "header"])
def test_a_timeout_aborts_the_request_and_says_so(how):
    async def use(server: StoryServer):
        gate = stalled(server)
        body = dict(prompt="once", max_tokens=90) | ({"timeout": 0.05} if how == "field" else {})
        headers = {"x-request-timeout": "0.05"} if how == "header" else {}
        answers = []
        for stream in (False, True):
            fields = body | {"stream": stream}
            answers.append(await server.http.post(TEXT, json=fields, headers=headers))
            gate.set()
            await server.until_idle()
            gate.clear()
        return *answers, server.num_free_blocks

    whole, streamed, free = run(use)
    error = stories.error_of(whole)
    assert whole.status_code == 504 and error["type"] == "timeout_error"
    assert "timeout of 0.05 seconds" in error["message"] and error["param"] == "timeout"
    assert whole.headers["x-should-retry"] == "false"
    *begun, last = parse_events(streamed.text)
    assert last["error"]["code"] == 504 and begun, "what came in time is there"
    assert free == 399


def test_answers_within_their_timeout_and_bad_timeouts():
    async def use(server: StoryServer):
        fields = dict(prompt="once", max_tokens=8, timeout=60)
        assert (await server.ok(TEXT, **fields))["choices"][0]["text"] == continuation(4, 8)
        events = await server.events(TEXT, **fields)
        assert "".join(e["choices"][0]["text"] for e in events) == continuation(4, 8)
        for wrong in (0, -1, "soon", True):
            assert (await server.refused(TEXT, **fields | {"timeout": wrong}))["param"] == "timeout"
        response = await server.http.post(
            TEXT, json=dict(prompt="a"), headers={"x-request-timeout": "soon"}
        )
        assert "x-request-timeout" in stories.error_of(response)["message"]
        assert response.status_code == 400

    run(use)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "ask"), [(TEXT, {"prompt": "a"}), (CHAT, {"messages": HELLO})])
def test_masks_that_exclude_every_token_are_the_clients_doing(path, ask, stream):
    """Its one allowed token would end the text, which has to be longer."""

    async def use(server: StoryServer):
        end = server.llm.processor.eos_token_ids
        fields = dict(allowed_token_ids=end, min_tokens=3, max_tokens=9, stream=stream)
        response = await server.post(path, **ask, **fields)
        assert (await server.ok(TEXT, prompt="a", max_tokens=2))["choices"]
        return response

    response = run(use)
    if stream:
        error = parse_events(response.text)[-1]["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["code"] == 400 and error["type"] == "invalid_request_error"
    assert "allowed_token_ids" in error["message"]


class Stamp:
    """Plain ASGI."""

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        async def stamped(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"asgi")]
            await send(message)

        await self._app(scope, receive, stamped)


async def counted(request, call_next):
    response = await call_next(request)
    response.headers["x-path"] = request.url.path
    return response


def test_middleware_of_both_kinds():
    async def use(server: StoryServer):
        return await server.http.get("/health")

    headers = run(use, dict(middleware=(Stamp, counted))).headers
    assert headers["x-stamp"] == "asgi" and headers["x-path"] == "/health"


def test_requests_are_logged_when_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="jaxinfer")

    async def use(server: StoryServer):
        await server.ok(TEXT, prompt="once", request_id="mine", max_tokens=3)

    run(use)
    assert not [r for r in caplog.records if "mine" in r.getMessage()]
    run(use, dict(enable_log_requests=True))
    [line] = [r.getMessage() for r in caplog.records if "mine" in r.getMessage()]
    assert "cmpl-mine-0: 4 prompt tokens" in line and "max_tokens=3" in line
    assert "once" not in line


def test_the_log_shows_as_much_of_a_prompt_as_it_may(caplog):
    caplog.set_level(logging.INFO, logger="jaxinfer")

    async def use(server: StoryServer):
        await server.ok(TEXT, prompt="once upon", request_id="text")
        await server.ok(TEXT, prompt=[7, 8, 9], request_id="ids")

    run(use, dict(enable_log_requests=True, max_log_len=2))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("cmpl-")]
    assert "cmpl-text-0: 9 prompt tokens 'on', " in lines[0] and "once" not in lines[0]
    assert "cmpl-ids-0: 3 prompt tokens [7, 8], " in lines[1]


def test_the_routes_of_the_development_mode_are_closed_by_default():
    async def use(server: StoryServer):
        paths = ("/sleep", "/wake_up", "/reset_prefix_cache")
        return [(await server.http.post(path)).status_code for path in paths]

    assert run(use) == [404] * 3


def test_sleeping_and_waking_up():
    async def use(server: StoryServer):
        async def post(path, status=200):
            response = await server.http.post(path)
            assert response.status_code == status, response.text
            return response

        async def sleeps():
            return (await server.http.get("/is_sleeping")).json()["is_sleeping"]

        async def state():
            """By its name in `/metrics`; exactly one is 1."""
            lines = (await server.http.get("/metrics")).text.splitlines()
            found = [line for line in lines if line.startswith("jaxinfer:engine_sleep_state{")]
            [one] = [line for line in found if line.endswith(" 1.0")]
            assert len(found) == 3
            return one.split('sleep_state="')[1].split('"')[0]

        assert await state() == "awake"
        cached = dict(prompt="once upon a time there", max_tokens=2)
        await server.ok(TEXT, **cached)
        await post("/reset_prefix_cache")
        usage = (await server.ok(TEXT, **cached))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert "level must be 1 or 2" in json.dumps((await post("/sleep?level=3", 400)).json())
        await post("/sleep?level=deep", 400)
        await post("/sleep?level=2")
        assert await sleeps() and "sleep 2" in server.executor.log
        assert await state() == "discard_all"
        assert "sleeps" in (await server.refused(TEXT, prompt="a"))["message"]
        await post("/wake_up?tags=engine", 400)
        await post("/wake_up?tags=weights")
        assert await sleeps() and await state() == "discard_all"
        await post("/wake_up")
        assert not await sleeps() and await state() == "awake"
        await server.ok(TEXT, **cached)

    run(use, dict(dev_mode=True))
