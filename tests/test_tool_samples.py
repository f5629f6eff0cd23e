"""Calls that a model of noise, which takes every turn that a mask leaves open, has to make at temperature 1: through
OpenAI's client, every one is for a tool, and `jsonschema` accepts its arguments. `TOOL_SAMPLES=1000` draws that many."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from tests.noise_checkpoint import noise_checkpoint

pytestmark = pytest.mark.real

SAMPLES = int(os.environ.get("TOOL_SAMPLES", "20"))
MAX_LEN = 512 if SAMPLES < 100 else 2048
"""Room for more calls than chance strings together in as many answers."""
NUM_SEQS = 32
QUESTIONS = (
    "What is the weather in Paris and in Rome?",
    "Remind me to call Ann on Friday, please.",
    "Who wrote this?",
)


def closed(**properties: Any) -> dict[str, Any]:
    return dict(type="object", properties=properties, required=sorted(properties))


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name, "description": f"To {name.replace('_', ' ')}."}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


PLACE = closed(name={"type": "string", "maxLength": 30}, country={"enum": ["France", "イタリア"]})
TOOLS = [
    tool(
        "get_weather",
        closed(place={"$ref": "#/$defs/place"}, days={"type": "integer", "minimum": 1, "maximum": 14})
        | {"$defs": {"place": PLACE}},
    ),
    tool(
        "add_reminder",
        closed(
            text={"type": "string", "minLength": 3, "maxLength": 40},
            repeat={"anyOf": [{"type": "null"}, {"enum": ["daily", "weekly"]}]},
            people={"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        ),
    ),
    tool("look_around", None),
]  # fmt: skip
SCHEMAS = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[AsyncLLM]:
    limits = dict(max_model_len=MAX_LEN, max_num_seqs=NUM_SEQS, max_num_batched_tokens=64)
    with noise_checkpoint(smollm2_gguf, MAX_LEN) as directory:
        llm = AsyncLLM(directory, dtype="float32", **limits)
        yield llm
        llm.shutdown()


async def draw(client: openai.AsyncOpenAI, index: int) -> list[tuple[str, str]]:
    """Names and arguments of one answer's calls; every other answer is streamed."""
    fields = dict(
        model="noise",
        messages=[{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=index % 3 != 0,
        temperature=1.0,
        seed=index,
    )
    if index % 2:
        async with client.chat.completions.stream(**fields) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await client.chat.completions.create(**fields)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls", choice
    calls = choice.message.tool_calls
    assert calls and len({call.id for call in calls}) == len(calls)
    assert len(calls) == 1 or index % 3
    return [(call.function.name, call.function.arguments) for call in calls]


def test_every_call_is_valid(llm: AsyncLLM):
    async def use() -> list[list[tuple[str, str]]]:
        app = build_app(llm, ServerSettings(served_model_name=("noise",)))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), timeout=None)
        free = asyncio.Semaphore(2 * NUM_SEQS)

        async def one(index: int) -> list[tuple[str, str]]:
            async with free:
                return await draw(client, index)

        async with openai.AsyncOpenAI(
            base_url="http://x/v1", api_key="none", max_retries=0, timeout=None, http_client=http
        ) as client:
            return await asyncio.gather(*map(one, range(SAMPLES)))

    answers = asyncio.run(use())
    validators = {name: jsonschema.Draft202012Validator(s) for name, s in SCHEMAS.items()}
    names: Counter[str] = Counter()
    for calls in answers:
        for name, arguments in calls:
            validators[name].validate(json.loads(arguments))
            names[name] += 1
    print(f"{len(answers)} answers, {names.total()} calls: {dict(names)}")
    assert len(answers) == SAMPLES
