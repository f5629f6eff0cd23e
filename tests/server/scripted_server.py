"""The HTTP application over the fake device and real grammars: the model writes what a script says, as far as masks let
it, or noise."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.llguidance_grammars import LlguidanceBackend
from jaxinfer.engine_factory import Engine
from jaxinfer.frontend.processor import Processor
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import make_config
from tests.server.story_server import StoryServer

END = "<|end|>"
SPECIAL = [END, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "[TOOL_CALLS]"]
THINK = ["<think>", "</think>"]
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if closed %}<think>{{ '\\n' }}</think>{% endif %}{% endif %}"
)

type Script = str | Callable[[str], str | Sequence[str]] | None
"""A text, or what makes one of a prompt: several texts where masks may decide, of which the first is written that goes
on from what has been written. None is noise."""


def _tokenizer() -> Tokenizer:
    characters = ["Ġ", "Ċ", *map(chr, range(ord("!"), ord("~") + 1))]
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in THINK])
    return Tokenizer(backend, {"eos_token": END}, {"default": TEMPLATE})


TOKENIZER = _tokenizer()
_ASSISTANT, _EOS = (TOKENIZER.backend.token_to_id(t) for t in ("<|assistant|>", END))
_CLOSED = TOKENIZER.encode("<think>\n</think>")


def _writer(script: Script) -> Callable[[Sequence[int]], int]:
    if script is None:
        noise = random.Random(0)
        return lambda context: noise.randrange(TOKENIZER.vocab_size)

    def write(context: Sequence[int]) -> int:
        start = len(context) - list(reversed(context)).index(_ASSISTANT)
        if list(context[start : start + len(_CLOSED)]) == _CLOSED:
            start += len(_CLOSED)
        prompt = TOKENIZER.decode(context[:start], skip_special_tokens=False)
        text = script if isinstance(script, str) else script(prompt)
        at = len(context) - start
        if not isinstance(text, str):
            written = TOKENIZER.decode(context[start:], skip_special_tokens=False)
            text = next((t for t in text if t.startswith(written)), "")
        ids = TOKENIZER.encode(text)
        return ids[at] if at < len(ids) else _EOS

    return write


class ScriptedServer(StoryServer):
    async def message(self, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
        """The only choice of a chat that isn't streamed."""
        [choice] = (await self.ok(path, **body))["choices"]
        return choice

    async def streamed(self, **body: Any) -> dict[str, Any]:
        """The choice that a stream's chunks add up to, as `message` gives it."""
        message: dict[str, Any] = {}
        reason = None
        for event in await self.events("/v1/chat/completions", **body):
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                _add(message, choice["delta"])
        return {"message": message, "finish_reason": reason}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["type"] == "function" and call["id"] and call["function"]["name"]
            calls.append({"name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and parsed arguments."""
    calls = choice["message"].get("tool_calls") or []
    flat = [call.get("function", call) for call in calls]
    return [(call["name"], json.loads(call["arguments"])) for call in flat]


@asynccontextmanager
async def scripted_server(
    script: Script, settings: dict[str, Any] | None = None, max_model_len: int = 2048
) -> AsyncIterator[ScriptedServer]:
    from llguidance import LLTokenizer

    config = make_config(max_model_len=max_model_len, max_num_seqs=8, budget=512, block_size=16)
    config = replace(config, model=replace(config.model, vocab_size=TOKENIZER.vocab_size))
    executor = FakeExecutor(config, 2000, _writer(script))
    grammars = LlguidanceBackend(
        lambda: LLTokenizer(
            TOKENIZER.backend.to_str(), n_vocab=TOKENIZER.vocab_size, eos_token=_EOS
        )
    )
    core = EngineCore(config, executor, grammars)
    processor = Processor(config.model, TOKENIZER)
    llm = AsyncLLM.from_engine(Engine(config, core, TOKENIZER, processor, TokenText(TOKENIZER)))
    names = ServerSettings(**{"served_model_name": ("scripted",), **(settings or {})})
    try:
        app = build_app(llm, names)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
            yield ScriptedServer(http, app, llm, core, executor)
    finally:
        llm.shutdown()


def run(
    script: Script,
    test: Callable[[ScriptedServer], Awaitable[Any]],
    settings: dict[str, Any] | None = None,
) -> Any:
    async def use() -> Any:
        async with scripted_server(script, settings) as server:
            return await test(server)

    return asyncio.run(use())
