"""What `AsyncLLM` hands to whoever reads a request's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from jaxinfer.engine.messages import FinishReason
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.frontend.request_state import RequestState
from jaxinfer.outputs import RequestFailedError, RequestOutput
from jaxinfer.sampling_params import RequestOutputKind


class RequestStream:
    """The outputs of one request, for `async for`. What has come and was not read yet is one output.

    Raises `RequestFailedError` for a request that fails on the way. `close` when done, however it ends. `on_output`
    hears of each output as it comes, `on_close` ends the request if it still runs.
    """

    state: RequestState

    def __init__(
        self,
        request: PreparedRequest,
        on_output: Callable[[PreparedRequest, RequestOutput], None],
        on_close: Callable[[RequestStream], None],
    ) -> None:
        self.request = request
        self._on_output = on_output
        self._on_close = on_close
        self._is_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._is_read = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._on_output(self.request, output)
        if self._is_delta and self._output is not None:
            self._output.add(output)
        else:
            self._output = output
        self._wake_reader()

    @property
    def is_running(self) -> bool:
        """Whether the engine still works on it."""
        return self.state.num_unfinished > 0

    def fail(self, error: Exception) -> None:
        """Raise this instead of whatever was not read yet."""
        self._error = error
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_read:
            raise StopAsyncIteration
        while self._output is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        assert output is not None
        self._is_read = output.finished
        _raise_if_failed(output)
        return output

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._on_close(self)


def _raise_if_failed(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == str(FinishReason.ERROR):
            raise RequestFailedError({0: str(completion.stop_reason)}, [output])
