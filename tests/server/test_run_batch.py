"""`jaxinfer run-batch` against the format that OpenAI documents for batch input and output files."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from jaxinfer import AsyncLLM, cli
from jaxinfer.server.run_batch import run_batch
from jaxinfer.server.settings import ServerSettings
from tests.frontend.story_engine import continuation, story_engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def line(custom_id, url=TEXT, method="POST", **body) -> str:
    fields = dict(custom_id=custom_id, method=method, url=url, body={"model": "story"} | body)
    return json.dumps(fields)


def run(tmp_path, lines, **options):
    """Answers by custom id (in a list, as it may be missing or twice there), and counts."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    engine, executor = story_engine(**options.pop("engine", {}))

    async def use():
        llm = AsyncLLM.from_engine(engine)
        try:
            return await run_batch(llm, ServerSettings(("story",)), source, target, **options)
        finally:
            llm.shutdown()

    counts = asyncio.run(use())
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["id"].startswith("batch_req_")
        assert (answer["response"] is None) != (answer["error"] is None)
        if answer["response"] is not None:
            assert set(answer["response"]) == {"status_code", "request_id", "body"}
    assert len({answer["id"] for answer in answers}) == len(answers)
    return answers, counts, executor


def test_every_line_is_answered_as_the_endpoint_would(tmp_path):
    lines = [
        line("first", prompt="once", max_tokens=5),
        "",
        line("chat é", CHAT, messages=HELLO, max_tokens=3, n=2),
        line("ids", prompt=[1, 2, 3], max_tokens=2),
    ]
    answers, counts, _ = run(tmp_path, lines)
    assert (counts.num_requests, counts.num_failed) == (3, 0)
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert {response["status_code"] for response in found.values()} == {200}
    first = Completion.model_validate(found["first"]["body"])
    assert first.choices[0].text == continuation(4, 5) and first.usage.completion_tokens == 5
    chat = ChatCompletion.model_validate(found["chat é"]["body"])
    assert len(chat.choices) == 2 and chat.choices[0].finish_reason == "length"
    assert found["ids"]["body"]["choices"][0]["text"] == continuation(3, 2)


def test_bad_lines_are_reported_one_by_one(tmp_path):
    lines = [
        "{",
        "[1]",
        '{"custom_id": 3}',
        line("speech", "/v1/audio/speech", input="x"),
        line("get", method="GET", prompt="x"),
        line("ok", prompt="a", max_tokens=1),
        line("ok", prompt="a", max_tokens=1),
        json.dumps(dict(custom_id="body", method="POST", url=TEXT, body="x")),
        line("streamed", prompt="a", stream=True),
        line("bad value", prompt="a", temperature=-1),
        line("bad model", prompt="a").replace("story", "gpt-4"),
        '{"custom_id": "half',
    ]
    answers, counts, _ = run(tmp_path, lines)
    assert (counts.num_requests, counts.num_failed) == (12, 11)
    errors = {
        int(a["error"]["message"].split()[1].rstrip(":")): (a["custom_id"], a["error"])
        for a in answers
        if a["error"]
    }
    assert sorted(errors) == [1, 2, 3, 4, 5, 7, 8, 9, 12]
    assert {error["code"] for _, error in errors.values()} == {"invalid_line"}
    for number, custom_id, text in (
        (1, None, "no valid JSON"),
        (2, None, "must be a JSON object"),
        (3, None, "custom_id must be a string, got 3"),
        (4, "speech", "url must be one of /v1/chat/completions, /v1/completions"),
        (5, "get", "method must be POST, got 'GET'"),
        (7, "ok", "custom_id 'ok' is that of line 6 too"),
        (8, "body", "body must be a JSON object"),
        (9, "streamed", "no streams"),
    ):
        assert errors[number][0] == custom_id and text in errors[number][1]["message"]
    refused = {a["custom_id"]: a["response"] for a in answers if a["response"]}
    assert refused["ok"]["status_code"] == 200
    assert refused["bad value"]["status_code"] == 400
    assert refused["bad value"]["body"]["error"]["param"] == "temperature"
    assert refused["bad model"]["status_code"] == 404


def test_no_more_requests_at_once_than_allowed(tmp_path):
    lines = [line(str(i), prompt="a", max_tokens=3) for i in range(30)]
    answers, counts, executor = run(tmp_path, lines, max_concurrency=3)
    assert counts.num_requests == 30 and not counts.num_failed
    assert sorted(int(a["custom_id"]) for a in answers) == list(range(30))
    assert max(len(plan.rows) for plan in executor.plans) in (2, 3)


@pytest.mark.parametrize("bad", [False, True])
def test_the_command(tmp_path, monkeypatch, capsys, bad):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line("a", prompt="once", max_tokens=4, model="mine"), "{"][: 1 + bad]
    source.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr("jaxinfer.async_llm.build_engine", lambda args: story_engine()[0])
    flags = ["--model", "m", "--served-model-name", "mine", "-i", str(source), "-o", str(target)]
    assert cli.main(["run-batch", *flags]) == bad
    assert f"{1 + bad} requests, {int(bad)} failed." in capsys.readouterr().err
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    [first] = [a["response"] for a in answers if a["response"]]
    assert first["body"]["choices"][0]["text"] == continuation(4, 4)
    assert cli.main(["run-batch", *flags[:-1], str(source)]) == 2
    assert "output_file must be another file" in capsys.readouterr().err
    assert source.read_text(), "nothing was written over"
    assert cli.main(["run-batch", *flags, "--max-concurrency", "0"]) == 2
