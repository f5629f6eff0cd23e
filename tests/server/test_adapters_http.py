"""Adapters over HTTP. The fake device goes on in the story as if the adapter's content came before the prompt."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from jaxinfer import LLM, LoRARequest, RequestFailedError, SamplingParams
from jaxinfer.config import LoRAConfig
from jaxinfer.engine_args import EngineArgs
from jaxinfer.server.adapter_args import RUNTIME_VARIABLE
from jaxinfer.server.args import add_server_args, server_settings
from tests.frontend.story_engine import continuation, story_engine
from tests.server.story_server import StoryServer, run
from tests.server.test_api_servers import FLAGS, eventually, fresh
from tests.server.test_serve_process import TEXT, client, model_dir, story

__all__ = ["model_dir"]

LORA = LoRAConfig(2, 8, 2, "float32")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
FOLDERS = {"/a": "one", "/b": "three"}


def told(content: str, num_tokens: int = 9) -> str:
    return continuation(len("once") + len(content), num_tokens)


def use(test, settings=None):
    async def prepared(server: StoryServer):
        server.executor.folders = dict(FOLDERS)
        await test(server)

    run(prepared, {"runtime_lora": True, **(settings or {})}, lora=LORA)


async def text(server: StoryServer, model: str, **more) -> str:
    body = dict(prompt="once", max_tokens=9, model=model) | more
    answer = await server.ok(TEXT, **body)
    assert answer["model"] == ("story" if model == "tale" else model)
    return answer["choices"][0]["text"]


def test_the_model_of_a_request_is_its_adapter():
    async def check(server: StoryServer):
        assert (await server.post(LOAD, lora_name="a", lora_path="/a")).status_code == 200
        assert (await server.post(LOAD, lora_name="b", lora_path="/b")).status_code == 200
        names = ["a", "story", "b", "tale", "b", "a"]
        texts = await asyncio.gather(*(text(server, name) for name in names))
        contents = {"a": "one", "b": "three"}
        assert texts == [told(contents.get(name, "")) for name in names]
        streamed = await server.events(TEXT, prompt="once", max_tokens=9, model="b")
        assert "".join(event["choices"][0]["text"] for event in streamed) == told("three")
        assert {event["model"] for event in streamed} == {"b"}
        error = await server.refused(TEXT, 404, prompt="once", model="c")
        assert error["param"] == "model" and "`c` does not exist" in error["message"]
        listed = (await server.http.get("/v1/models")).json()["data"]
        shown = [(card["id"], card["root"], card["parent"]) for card in listed]
        assert shown == [
            ("story", "fake", None),
            ("tale", "fake", None),
            ("a", "/a", "story"),
            ("b", "/b", "story"),
        ]
        assert (await server.http.get("/v1/models/b")).json() == listed[3]
        assert (await server.http.get("/v1/models/c")).status_code == 404
        label = 'jaxinfer:lora_requests_info{engine="0",max_lora="2"'
        assert await server.metric(label) > 1e9

    use(check)


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            "/v1/chat/completions",
            dict(messages=[{"role": "user", "content": "once"}], max_tokens=5),
            lambda body: body["choices"][0]["message"]["content"],
        ),
        (
            "/v1/responses",
            dict(input="once", max_output_tokens=5),
            lambda body: body["output"][0]["content"][0]["text"],
        ),
        (
            "/v1/messages",
            dict(messages=[{"role": "user", "content": "once"}], max_tokens=5),
            lambda body: body["content"][0]["text"],
        ),
    ],
)
def test_all_apis(path, body, answer):
    async def check(server: StoryServer):
        await server.post(LOAD, lora_name="a", lora_path="/a")
        plain = await server.ok(path, model="story", **body)
        adapted = await server.ok(path, model="a", **body)
        assert (plain["model"], adapted["model"]) == ("story", "a")
        # The first letter of the story's rest, and three letters later.
        assert answer(adapted)[:2] == answer(plain)[3:5]
        assert (await server.post(path, model="b", **body)).status_code == 404

    use(check)


def test_loading_again_and_unloading():
    async def check(server: StoryServer):
        await server.post(LOAD, lora_name="a", lora_path="/a")
        error = await server.refused(LOAD, lora_name="a", lora_path="/b")
        assert error["param"] == "lora_name" and "load_inplace" in error["message"]
        began = asyncio.create_task(text(server, "a", max_tokens=60))
        while not server.core.scheduler.running:
            await asyncio.sleep(0)
        server.executor.folders["/a"] = "something new"
        again = await server.post(LOAD, lora_name="a", lora_path="/a", load_inplace=True)
        assert again.status_code == 200
        assert await text(server, "a") == told("something new")
        assert await began == told("one", 60)
        unloaded = asyncio.create_task(text(server, "a", max_tokens=60))
        while not server.core.scheduler.running:
            await asyncio.sleep(0)
        assert (await server.post(UNLOAD, lora_name="a")).status_code == 200
        assert await unloaded == told("something new", 60)
        await server.refused(TEXT, 404, prompt="once", model="a")
        assert (await server.refused(UNLOAD, 404, lora_name="a"))["param"] == "lora_name"

    use(check)


def test_bad_loads_leave_everything_as_it_was():
    async def check(server: StoryServer):
        for body, param in (
            (dict(lora_name="x", lora_path="/nowhere"), "lora_path"),
            (dict(lora_name="story", lora_path="/a"), "lora_name"),
            (dict(lora_name="", lora_path="/a"), "lora_name"),
            (dict(lora_name="x"), "lora_path"),
            (dict(lora_name="x", lora_path="/a", rank=3), "rank"),
        ):
            assert (await server.refused(LOAD, **body))["param"] == param
        assert len((await server.http.get("/v1/models")).json()["data"]) == 2
        assert await text(server, "story") == told("")

    use(check)


def test_routes_only_where_they_are_wanted():
    async def check(server: StoryServer):
        assert (await server.post(LOAD, lora_name="a", lora_path="/a")).status_code == 404
        assert (await server.post(UNLOAD, lora_name="a")).status_code == 404

    use(check, {"runtime_lora": False})


def settings_of(*flags: str, **engine):
    parser = argparse.ArgumentParser()
    add_server_args(parser)
    return server_settings(parser.parse_args(flags), EngineArgs("some/model", **engine))


def test_flags(monkeypatch, capsys):
    as_json = '{"name": "b", "path": "/b=", "base_model_name": "some/model"}'
    found = settings_of("--lora-modules", "a=/a=1", as_json, enable_lora=True)
    assert found.lora_modules == (("a", "/a=1"), ("b", "/b=")) and not found.runtime_lora
    for flags, message in (
        (["a=/a", "a=/b"], "'a' is the name of something else too"),
        (["some/model=/a"], "'some/model' is the name"),
        ([as_json.replace("some/model", "other")], "base_model_name of 'b' is 'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            settings_of("--lora-modules", *flags, enable_lora=True)
    with pytest.raises(ValueError, match="lora_modules need enable_lora"):
        settings_of("--lora-modules", "a=/a")
    for text in ("a", "=/a", "a=", '{"name": "a"}', '{"name": "a", "path": 3}', "{"):
        with pytest.raises(SystemExit):
            settings_of("--lora-modules", text, enable_lora=True)
        assert "--lora-modules" in capsys.readouterr().err
    monkeypatch.setenv(RUNTIME_VARIABLE, "1")
    assert settings_of(enable_lora=True).runtime_lora
    with pytest.raises(ValueError, match=f"{RUNTIME_VARIABLE} needs enable_lora"):
        settings_of()


def test_several_cores_and_api_servers(model_dir, tmp_path, monkeypatch):
    """Every process knows what any of them was told."""
    monkeypatch.setenv(RUNTIME_VARIABLE, "1")
    for name, content in (("a", "one"), ("b", "three")):
        (tmp_path / name).write_text(content)
    served = f"a={tmp_path / 'a'}"
    flags = (*FLAGS, "--served-model-name", "story", "--enable-lora", "--lora-modules", served)

    async def answers(server, model) -> set:
        """Over connections that either process may get, of requests that either core may get."""
        found = set()
        for _ in range(8):
            async with client(server) as http:
                body = dict(prompt="once", max_tokens=9, model=model)
                answer = await http.post(TEXT, json=body)
                found.add(
                    answer.json()["choices"][0]["text"] if answer.is_success else answer.status_code
                )
        return found

    async def check(server):
        assert await answers(server, "a") == {told("one")}
        assert await answers(server, "b") == {404}
        async with client(server) as http:
            body = dict(lora_name="b", lora_path=str(tmp_path / "b"))
            assert (await http.post(LOAD, json=body)).status_code == 200

        async def known() -> bool:
            listed = [(await fresh(server, "/v1/models")).json()["data"] for _ in range(8)]
            return {len(cards) for cards in listed} == {3}

        await eventually(known)
        assert await answers(server, "b") == {told("three")}
        async with client(server) as http:
            assert (await http.post(UNLOAD, json=dict(lora_name="a"))).status_code == 200

        async def gone() -> bool:
            return await answers(server, "a") == {404}

        await eventually(gone)

    with story("story", model_dir, *flags) as server:
        asyncio.run(check(server))
        assert server.stop() == 0


def test_conversations():
    engine, executor = story_engine(lora=LORA)
    executor.folders = dict(FOLDERS)
    turn = [{"role": "user", "content": "once"}]
    with LLM.from_engine(engine) as llm:
        params, adapter = SamplingParams(max_tokens=5), LoRARequest("a", 1, "/a")
        found = llm.chat([turn] * 2, params, use_tqdm=False, lora_request=[None, adapter])
        plain, adapted = (output.outputs[0].text for output in found)
        assert adapted[:2] == plain[3:5]
        [again] = llm.chat(turn, params, use_tqdm=False, lora_request=adapter)
        assert again.outputs[0].text == adapted


def test_a_request_whose_adapter_cannot_be_read_ends_alone():
    async def check(server: StoryServer):
        params = SamplingParams(max_tokens=9)

        async def last(name):
            adapter = LoRARequest(name, ord(name), f"/{name}")
            return [o async for o in server.llm.generate("once", params, lora_request=adapter)][-1]

        good = asyncio.create_task(last("a"))
        with pytest.raises(RequestFailedError, match="/x holds no adapter") as refused:
            await last("x")
        assert refused.value.is_refused
        assert (await good).outputs[0].text == told("one")
        assert await server.llm.list_loras() == {ord("a")}
        with pytest.raises(ValueError, match="/x holds no adapter"):
            await server.llm.add_lora(LoRARequest("x", 9, "/x"))

    use(check)
