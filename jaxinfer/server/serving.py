"""What all endpoints that generate share: from a request's prompt and parameters to running streams and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol
from uuid import uuid4

from fastapi import Request

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.engine.messages import Thinking
from jaxinfer.frontend.processor import PreparedRequest, PromptTooLongError
from jaxinfer.frontend.tool_parsers import ToolParser, tool_parsers
from jaxinfer.lora_request import LoRARequest
from jaxinfer.outputs import RequestOutput
from jaxinfer.pooling_llm import refuse_pooling
from jaxinfer.request_stream import RequestStream
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.adapters import ServedAdapters
from jaxinfer.server.errors import ApiError, BadRequest, ContextExceeded, from_value_error
from jaxinfer.server.protocol.common import GenerationRequest
from jaxinfer.server.reasoning import Reasoning
from jaxinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_THREAD_ABOVE_CHARS = 16_384
"""Longer texts are tokenized outside of the event loop, where they would hold up every stream."""


@dataclass(slots=True)
class Serving:
    """`num_active` HTTP requests are being answered. `num_elsewhere`: how many completions the cores have to do, those
    of other processes included, where there are any."""

    llm: AsyncLLM
    settings: ServerSettings
    num_active: int = 0
    num_elsewhere: Callable[[], int] = int
    reasoning: Reasoning | None = field(init=False, default=None)
    """Set where a reasoning parser is."""
    adapters: ServedAdapters = field(init=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` for a reasoning parser that isn't the model's."""
        if self.settings.reasoning_parser is not None:
            tokenizer = self.llm.get_tokenizer()
            self.reasoning = Reasoning.of(self.settings.reasoning_parser, tokenizer)
        self.adapters = ServedAdapters(self.llm, self.settings.served_model_name)

    async def load_adapters(self) -> None:
        """Those of the settings. Raises `ValueError` where one doesn't fit the model."""
        for name, path in self.settings.lora_modules:
            try:
                await self.adapters.load(name, path)
            except ValueError as error:
                raise ValueError(f"lora_modules: {name}: {error}") from error

    @property
    def model(self) -> str:
        return self.settings.served_model_name[0]

    @property
    def tool_parser(self) -> type[ToolParser] | None:
        """Of the calls that models make when nothing holds them to it."""
        settings = self.settings
        if settings.tool_call_parser is None or not settings.enable_auto_tool_choice:
            return None
        return tool_parsers.get(settings.tool_call_parser)

    def is_special(self, text: str) -> bool:
        """Whether this is one of the model's special tokens, which texts are written without."""
        tokenizer = self.llm.get_tokenizer()
        [token] = tokenizer.convert_tokens_to_ids([text])
        return token is not None and token in tokenizer.all_special_ids

    @property
    def max_model_len(self) -> int:
        return self.llm.config.model.max_model_len

    def check_model(self, name: str | None) -> None:
        self.adapter(name)

    def reported(self, name: str | None) -> str:
        """What an answer says that it is from."""
        return self.model if self.adapter(name) is None else str(name)

    def adapter(self, name: str | None) -> LoRARequest | None:
        """What requests run with that name this as their model, None for the model's own names. Raises `ApiError`."""
        if name is None or name in self.settings.served_model_name:
            return None
        adapter = self.adapters.get(name)
        if adapter is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"The model `{name}` does not exist. This server has `{self.model}`.",
                kind="not_found_error",
                param="model",
            )
        return adapter

    def check_writes(self, http: Request) -> None:
        """Raises `WrongRunner` for an endpoint that generates, where the engine makes vectors."""
        refuse_pooling(self.llm.pooling, http.url.path)

    def sampling_params(self, request: GenerationRequest, **more: Any) -> SamplingParams:
        try:
            return request.sampling_params(self.llm.processor.sampling_defaults, **more)
        except ValueError as error:
            raise self.explain(error, request) from error

    def explain(
        self, error: ValueError, request: GenerationRequest, prompt_field: str = "prompt"
    ) -> BadRequest:
        """What the engine refused, by the name that the field has in the request."""
        if isinstance(error, PromptTooLongError):
            return ContextExceeded(error.num_tokens, self.max_model_len, prompt_field)
        known = from_value_error(error, type(request).model_fields)
        if known.param == "prompt":
            known.param = prompt_field
        elif known.param == "logprobs" and prompt_field == "messages":
            known.param = "top_logprobs"
        elif str(error).startswith("extra_args"):
            known.param = "vllm_xargs"
        elif known.param == "structured_outputs":
            known.param = request.structured_field
        return known

    async def prepare(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        *,
        add_special_tokens: bool,
        limit_name: str,
        prompt_field: str,
        thinking: Thinking | None = None,
    ) -> PreparedRequest:
        """Raises `BadRequest` for what the engine can't do, and for an output limit that doesn't fit the context."""
        adapter = self.adapter(request.model)
        is_long = isinstance(prompt, str) and len(prompt) > _THREAD_ABOVE_CHARS

        def work() -> PreparedRequest:
            return self.llm.prepare(
                self._prompt(request, prompt, params, add_special_tokens),
                params,
                request_id,
                request.priority,
                thinking=thinking,
                lora_request=adapter,
            )

        try:
            prepared = await asyncio.to_thread(work) if is_long else work()
        except ValueError as error:
            raise self.explain(error, request, prompt_field) from error
        num_prompt, limit = len(prepared.prompt_token_ids), getattr(request, limit_name)
        if limit and limit + num_prompt > self.max_model_len:
            raise ContextExceeded(num_prompt, self.max_model_len, limit_name, limit)
        if self.settings.enable_log_requests:
            shown = f" {prompt[: self.settings.max_log_len]!r}" if self.settings.max_log_len else ""
            logger.info(
                "%s: %d prompt tokens%s, %r",
                request_id,
                num_prompt,
                shown,
                prepared.sampling_params,
            )
        return prepared

    def _prompt(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        params: SamplingParams,
        add_special_tokens: bool,
    ) -> Any:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt must not be empty.")
            ids = self.llm.get_tokenizer().encode(prompt, add_special_tokens=add_special_tokens)
        else:
            ids = prompt
        keep = request.truncate_prompt_tokens
        if keep is not None:
            if keep == -1:
                keep = self.max_model_len - (params.max_tokens or 1)
            if keep < 1:
                raise ValueError(f"truncate_prompt_tokens must be at least 1, got {keep}.")
            if len(ids) > keep:
                ids = ids[:keep] if request.truncation_side == "right" else ids[-keep:]
        made: dict[str, Any] = {"prompt_token_ids": ids}
        if isinstance(prompt, str):
            made["prompt"] = prompt
        if request.cache_salt is not None:
            made["cache_salt"] = request.cache_salt
        return made

    def submit(self, prepared: Sequence[PreparedRequest]) -> list[RequestStream]:
        """Start all of them, or none."""
        self.check_queue(sum(len(p.core_requests) for p in prepared))
        streams: list[RequestStream] = []
        try:
            for request in prepared:
                streams.append(self.llm.submit(request))
        except ValueError as error:
            close(streams)
            raise BadRequest(str(error)) from error
        except BaseException:
            close(streams)
            raise
        return streams

    def check_queue(self, num_new: int) -> None:
        limit = self.settings.max_num_queued_reqs
        if limit is None:
            return
        running = self.llm.config.scheduler.max_num_seqs * self.llm.num_cores
        if max(self.llm.num_unfinished, self.num_elsewhere()) + num_new > running + limit:
            self.llm.metrics.turned_away("max_num_queued_reqs")
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The queue is full: at most {limit} completions may wait.",
                kind="service_unavailable",
                headers={"Retry-After": "1"},
            )


def close(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.close()


class HasRequestId(Protocol):
    @property
    def request_id(self) -> str | None: ...


def request_id(http: Request, request: HasRequestId) -> str:
    """The client's, or a new one."""
    return request.request_id or http.headers.get("x-request-id") or uuid4().hex


def now() -> int:
    return int(time.time())


async def final_outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Of FINAL_ONLY requests. They run at once, whichever is waited for first."""
    try:
        return [await anext(stream) for stream in streams]
    finally:
        close(streams)


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """All outputs as they come, with the index of their stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return

    def start(index: int) -> asyncio.Task[RequestOutput]:
        return asyncio.ensure_future(anext(streams[index]))  # type: ignore[arg-type]

    waiting = {start(i): i for i in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                output = task.result()
                if not output.finished:
                    waiting[start(index)] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()


async def until_disconnect[T](http: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """The result, or None when the client left first, whereupon the work is cancelled."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
