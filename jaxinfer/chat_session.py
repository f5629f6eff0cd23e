"""A conversation in the terminal: answers stream as they come, Ctrl-C ends an answer and not the conversation."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM

_HELP = "/clear starts over, /quit (or Ctrl-D) ends, Ctrl-C stops an answer."


class ChatSession:
    """Keeps the messages so far; each answer sees all of them. Writes to stdout."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.close()

    def run(self) -> None:
        """Read messages from stdin until it ends or says /quit."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(_HELP)
        while True:
            try:
                message = input("> " if is_terminal else "").strip()
            except (EOFError, KeyboardInterrupt):
                if is_terminal:
                    print()
                return
            if message in ("/quit", "/exit"):
                return
            if message == "/clear":
                self._messages = list(self._system)
            elif message.startswith("/"):
                print(_HELP)
            elif message:
                self._turn(message)

    def _turn(self, message: str) -> None:
        """A message that can't be answered is taken back; the conversation goes on."""
        before = len(self._messages)
        try:
            self.answer(message)
        except KeyboardInterrupt:
            print(" [stopped]")
        except ValueError as error:
            if before == len(self._system):
                raise  # not even the first one: the model has no chat template, say
            del self._messages[before:]
            print(f"error: {error} /clear starts over.", file=sys.stderr)

    def answer(self, message: str) -> str:
        """Stream the answer to `message`; returns it. An answer that Ctrl-C ends stays in the conversation as it is.

        Raises `ValueError` for a conversation that the model can't take.
        """
        self._messages.append({"role": "user", "content": message})
        prompt = self._llm.apply_chat_template(self._messages, add_generation_prompt=True)
        parts: list[str] = []
        try:
            self._runner.run(self._stream(prompt, parts))
        finally:
            if parts:
                self._messages.append({"role": "assistant", "content": "".join(parts)})
        print()
        return "".join(parts)

    async def _stream(self, prompt: str, parts: list[str]) -> None:
        outputs = self._llm.generate(prompt, self._params, add_special_tokens=False)
        async with aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    if completion.text:
                        parts.append(completion.text)
                        print(completion.text, end="", flush=True)
