"""`/v1/messages` and `/v1/messages/count_tokens`: the API that Anthropic's clients speak."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.server.chat_run import ChatRun
from jaxinfer.server.deadline import Deadline
from jaxinfer.server.errors import ApiError, json_response
from jaxinfer.server.message_blocks import Event, MessageBlocks
from jaxinfer.server.named_events import NamedEventStream
from jaxinfer.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.serving import Serving, final_outputs, until_disconnect
from jaxinfer.server.streaming import RESPONSES, Chunks


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None, responses=RESPONSES)
    async def create(request: MessagesRequest, http: Request) -> Response:
        serving.check_model(request.model)
        try:
            call = _Call(serving, request.chat())
            deadline = Deadline.of(http, call.chat)
            stream = await call.run.start()
        except ApiError as error:
            raise request.renamed(error) from error
        if request.stream:
            return NamedEventStream(
                call.events(stream),
                deadline.watch([stream]),
                lambda error: error.messages_body,
            )
        outputs = await until_disconnect(http, lambda: deadline.wait(final_outputs([stream])))
        return (
            Response(status_code=499) if outputs is None else json_response(call.body(outputs[0]))
        )

    @routes.post("/v1/messages/count_tokens", response_model=None)
    def count_tokens(request: CountTokensRequest) -> Response:
        serving.check_model(request.model)
        try:
            run = ChatRun(serving, request.chat(tool_choice="none"), "")
            return json_response({"input_tokens": run.count_prompt()})
        except ApiError as error:
            raise request.renamed(error) from error

    return routes


class _Call:
    def __init__(self, serving: Serving, chat: ChatCompletionRequest) -> None:
        self._serving = serving
        self._id = f"msg_{uuid4().hex}"
        self._model = serving.reported(chat.model)
        self.chat = chat
        self.run = ChatRun(serving, chat, self._id)
        self._blocks = MessageBlocks()

    def body(self, output: RequestOutput) -> dict[str, Any]:
        self.run.count(output)
        [completion] = output.outputs
        # The events are of no use here, but for what their making leaves in the blocks.
        list(self._blocks.add(self.run.pieces(completion)))
        content = self._blocks.content()
        return self._message() | {"content": content} | self._stop(completion)

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens from the cache are counted apart."""
        usage = self.run.usage
        return {
            "input_tokens": usage.num_prompt - usage.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached,
            "output_tokens": usage.num_completion,
        }

    def _stop(self, completion: CompletionOutput) -> dict[str, Any]:
        reason = "max_tokens" if completion.finish_reason == "length" else "end_turn"
        sequence = None
        if completion.finish_reason == "stop":
            if any(block["type"] == "tool_use" for block in self._blocks.content()):
                reason = "tool_use"
            elif isinstance(completion.stop_reason, str):
                reason, sequence = "stop_sequence", completion.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def events(self, stream: RequestStream) -> Chunks:
        begun = False
        async for output in stream:
            self.run.count(output)
            if not begun:
                begun = True
                yield {"type": "message_start", "message": self._message()}
            for completion in output.outputs:
                for event in self._blocks.add(self.run.pieces(completion)):
                    yield event
                if completion.finish_reason is not None:
                    for event in self._end(completion):
                        yield event

    def _end(self, completion: CompletionOutput) -> list[Event]:
        delta = {"type": "message_delta", "delta": self._stop(completion), "usage": self._usage()}
        return [*self._blocks.finish(), delta, {"type": "message_stop"}]
