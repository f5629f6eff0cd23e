"""`AsyncLLM`: many requests at once from asyncio, each a stream of outputs; the engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.config import EngineArgs
from jaxinfer.engine.client import ThreadClient
from jaxinfer.engine.messages import EngineCoreOutputs, FinishReason
from jaxinfer.engine_factory import Engine, build_engine
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.frontend.processor import Prompt
from jaxinfer.frontend.request_state import RequestState
from jaxinfer.outputs import RequestFailedError, RequestOutput
from jaxinfer.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.frontend.tokenizer import Tokenizer


class AsyncLLM:
    """Takes the arguments of `EngineArgs`. `shutdown` releases the device.

    Its methods are for one event loop at a time; the loop that calls `generate` also handles the outputs.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self._start(build_engine(EngineArgs(model=model, **engine_args)))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        return cls.from_engine(build_engine(args))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.config = engine.config
        self._tokenizer = engine.tokenizer
        self._processor = engine.processor
        self._outputs = OutputProcessor(engine.token_text)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[EngineCoreOutputs] = deque()
        self._inboxes: set[_Inbox] = set()
        self._client = ThreadClient(engine.core, self._on_outputs)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a request's outputs, of the kind that `sampling_params.output_kind` says.

        A reader slower than the engine gets the outputs it missed in one. To leave the generator early, by `aclose`
        or cancellation, aborts the request. Several requests may have the same `request_id`. `add_special_tokens`
        is False for text from a chat template.

        Raises `ValueError` for a request that can't be run, `RequestFailedError` for one that fails on the way
        (every one does when the engine dies), and `EngineDeadError` when the engine had died before.
        """
        prepared = self._processor.prepare(
            prompt, sampling_params, request_id, priority, add_special_tokens
        )
        self._loop = asyncio.get_running_loop()
        inbox = _Inbox(prepared.sampling_params.output_kind)
        request = self._outputs.add(prepared, inbox.put)
        self._inboxes.add(inbox)
        try:
            for core_request in prepared.core_requests:
                self._client.add_request(core_request)
            while True:
                output = await inbox.get()
                _raise_if_failed(output)
                yield output
                if output.finished:
                    return
        finally:
            self._inboxes.discard(inbox)
            self._abort([request])

    async def abort(self, request_id: str) -> None:
        """End the requests with this id; their generators yield a last output with finish reason "abort"."""
        self._abort(self._outputs.requests(request_id))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes: requests that come from now on compute their prompts anew, also while others
        run. True: it is done."""
        self._client.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own, from its generation config."""
        return self._processor.get_default_sampling_params()

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The text of a conversation, for `generate` with `add_special_tokens=False`."""
        return self._tokenizer.apply_chat_template(messages, **kwargs)

    def shutdown(self) -> None:
        """Stop the engine. Requests that still run end with "abort"."""
        self._client.shutdown()
        self._outputs.abort(self._outputs.requests())

    def _abort(self, requests: list[RequestState]) -> None:
        core_ids = self._outputs.abort(requests)
        if core_ids:
            self._client.abort_requests(core_ids)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Called in the engine's thread. The loop is woken once for all that has arrived by then."""
        self._arrived.append(outputs)
        if len(self._arrived) == 1 and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._handle_outputs)
            except RuntimeError:  # the loop was closed, and with it everyone who waited
                self._arrived.clear()

    def _handle_outputs(self) -> None:
        while self._arrived:
            try:
                to_abort = self._outputs.process(self._arrived.popleft())
            except Exception as error:  # nobody would hear of it, and everyone would wait
                for inbox in self._inboxes:
                    inbox.fail(error)
                raise
            if to_abort:
                self._client.abort_requests(to_abort)


class _Inbox:
    """What has come for one request and was not read yet, as one output."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._is_delta and self._output is not None:
            self._output.add(output)
        else:
            self._output = output
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        assert output is not None
        return output


def _raise_if_failed(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == str(FinishReason.ERROR):
            raise RequestFailedError({0: str(completion.stop_reason)}, [output])
