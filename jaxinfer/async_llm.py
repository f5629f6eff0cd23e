"""`AsyncLLM`: many requests at once from asyncio, each a stream of outputs; the engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from jaxinfer.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from jaxinfer.engine.client import EngineCoreClient, ThreadClient
from jaxinfer.engine.messages import EngineCoreOutputs, Thinking
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import Engine, EngineFrontend, build_engine
from jaxinfer.frontend.core_metrics import CoreMetrics
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.frontend.processor import PreparedRequest, Prompt
from jaxinfer.frontend.request_state import RequestState
from jaxinfer.lora_request import LoRARequest
from jaxinfer.metrics import Metric
from jaxinfer.outputs import RequestOutput
from jaxinfer.pooling_llm import AsyncPoolingMethods, pooling_processor, refuse_pooling
from jaxinfer.request_stream import RequestStream
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.frontend.tokenizer import Tokenizer


type Connect = Callable[[Callable[[EngineCoreOutputs], None]], EngineCoreClient]
"""Makes a client that calls its argument, in whichever thread, with every step's outputs."""


class Observer(Protocol):
    """Hears of everything that happens. Called in the event loop."""

    def request_added(self, request: PreparedRequest) -> None: ...

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        """Each output that a request's stream gets; the last one is `finished`, however the request ends."""
        ...

    def step(self, outputs: EngineCoreOutputs) -> None:
        """Before the requests that it ends have their last outputs."""
        ...


class AsyncLLM(AsyncPoolingMethods):
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

    @classmethod
    def from_client(
        cls, frontend: EngineFrontend, connect: Connect, num_blocks: Sequence[int | None] = (None,)
    ) -> Self:
        """Over one or several cores that are reached by a client of any kind, and whose KV caches have `num_blocks`,
        for metrics."""
        llm = cls.__new__(cls)
        llm._connect(frontend, connect, num_blocks)
        return llm

    def _start(self, engine: Engine) -> None:
        connect = partial(ThreadClient, engine.core)
        self._connect(engine.frontend, connect, [engine.core.num_blocks])

    def _connect(
        self, frontend: EngineFrontend, connect: Connect, num_blocks: Sequence[int | None]
    ) -> None:
        self.config = frontend.config
        self.processor = frontend.processor
        self.pooling = pooling_processor(frontend.config, frontend.processor, frontend.tokenizer)
        self.token_text = frontend.token_text
        self.num_cores = len(num_blocks)
        self.metrics = CoreMetrics(frontend.config, num_blocks)
        self.observer: Observer = self.metrics
        self._tokenizer = frontend.tokenizer
        self._outputs = OutputProcessor(frontend.token_text)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[EngineCoreOutputs] = deque()
        self._streams: set[RequestStream] = set()
        self._client = connect(self._on_outputs)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a request's outputs, of the kind that `sampling_params.output_kind` says.

        A reader slower than the engine gets the outputs it missed in one. To leave the generator early, by `aclose`
        or cancellation, aborts the request. Several requests may have the same `request_id`. `add_special_tokens`
        is False for text from a chat template. `lora_request`: the adapter that the model runs with.

        Raises `ValueError` for a request that can't be run, `RequestFailedError` for one that fails on the way
        (every one does when the engine dies), and `EngineDeadError` when the engine had died before.
        """
        stream = self.submit(
            self.prepare(
                prompt,
                sampling_params,
                request_id,
                priority,
                add_special_tokens=add_special_tokens,
                lora_request=lora_request,
            )
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
        thinking: Thinking | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """The first half of `generate`: tokenized and checked (`ValueError`), not started. Thread-safe."""
        refuse_pooling(self.pooling, "generate()")
        return self.processor.prepare(
            prompt,
            sampling_params,
            request_id,
            priority,
            add_special_tokens,
            thinking,
            lora_request,
        )

    def submit(self, prepared: PreparedRequest) -> RequestStream:
        """The second half: start a request, from the event loop that reads its outputs. Raises `EngineDeadError`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            # The loop before may have closed with outputs that nobody has handled.
            loop.call_soon(self._handle_outputs)
        stream = RequestStream(prepared, self.observer.request_output, self._close)
        self._streams.add(stream)
        stream.state = self._outputs.add(prepared, stream.put)
        core: int | None = None
        try:
            try:
                # All completions of a prompt go where it is computed once.
                for core_request in prepared.core_requests:
                    core = prepared.core = self._client.add_request(core_request, core)
            finally:
                self.observer.request_added(prepared)
        except BaseException:
            stream.close()
            raise
        return stream

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """See `LLM.beam_search`. Raises as `generate`; to cancel it aborts what runs."""
        prepared = self.processor.prepare(prompt, None, None, priority, add_special_tokens)
        eos, max_len = self.processor.eos_token_ids, self.config.model.max_model_len
        search = BeamSearch.of(prepared, params, eos, max_len)
        for _ in range(params.max_tokens):
            beams = [
                self.processor.prepare(
                    beam, search.step_params, None, priority, lora_request=lora_request
                )
                for beam in search.prompts
            ]
            if not beams:
                break
            streams: list[RequestStream] = []
            try:
                for beam in beams:
                    streams.append(self.submit(beam))
                search.advance([await anext(stream) for stream in streams])
            finally:
                for stream in streams:
                    stream.close()
        return search.result(self._tokenizer.decode)

    async def abort(self, request_id: str) -> None:
        """End the requests with this id; their generators yield a last output with finish reason "abort"."""
        self._abort(self._outputs.requests(request_id))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes: requests that come from now on compute their prompts anew, also while others
        run. True: it is done."""
        await self._call("reset_prefix_cache")
        return True

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`; with several cores, all of them have it then."""
        return await self._call("add_lora", *msgspec.structs.astuple(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await self._call("remove_lora", lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLM.pin_lora`."""
        return await self._call("pin_lora", lora_id)

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return {number for _, number, _ in await self._call("list_loras")}

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._client.call(name, *arguments))

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await self._call("sleep", level)
        self.metrics.slept(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self._call("wake_up", None if tags is None else list(tags))
        if not await self.is_sleeping():
            self.metrics.slept(0)

    async def is_sleeping(self) -> bool:
        return await self._call("is_sleeping")

    async def anatomy(self, core: int = 0) -> dict[str, Any]:
        """What is going on in an engine core, as `jaxinfer.engine.anatomy` describes it. Raises `EngineDeadError` where
        it has failed."""
        picture: dict[str, Any] = await asyncio.wrap_future(self._client.call("anatomy", core=core))
        return picture

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        return self.metrics.snapshot()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own, from its generation config."""
        return self.processor.get_default_sampling_params()

    @property
    def num_unfinished(self) -> int:
        """Completions that are waited for."""
        return self._outputs.num_unfinished

    def check_health(self, core: int | None = None) -> None:
        """Raises `EngineDeadError` when the engine core of this number has failed, or any."""
        self._client.check_health(core)

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The text of a conversation, for `generate` with `add_special_tokens=False`."""
        return self._tokenizer.apply_chat_template(messages, **kwargs)

    def shutdown(self) -> None:
        """Stop the engine. Requests that still run end with "abort"."""
        self._client.shutdown()
        self._outputs.abort(self._outputs.requests())

    def _close(self, stream: RequestStream) -> None:
        self._streams.discard(stream)
        self._abort([stream.state])

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
                outputs = self._arrived.popleft()
                self.observer.step(outputs)
                to_abort = self._outputs.process(outputs)
            except Exception as error:  # nobody would hear of it, and everyone would wait
                for stream in self._streams:
                    stream.fail(error)
                raise
            if to_abort:
                self._client.abort_requests(to_abort)
