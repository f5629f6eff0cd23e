"""`POST /v1/chat/completions`: a conversation, written as a prompt by the chat template, and answered."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.server.chat_run import ChatRun
from jaxinfer.server.deadline import Deadline
from jaxinfer.server.errors import json_response
from jaxinfer.server.logprobs import LogprobFormatter
from jaxinfer.server.message_parser import MessageFields
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.serving import (
    Serving,
    final_outputs,
    now,
    request_id,
    until_disconnect,
)
from jaxinfer.server.streaming import RESPONSES, Chunks, EventStream


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None, responses=RESPONSES)
    async def chat_completions(request: ChatCompletionRequest, http: Request) -> Response:
        serving.check_model(request.model)
        call = _Call(serving, request, f"chatcmpl-{request_id(http, request)}")
        deadline = Deadline.of(http, request)
        if request.use_beam_search:
            found = await until_disconnect(http, lambda: deadline.wait(call.run.beams()))
            return Response(status_code=499) if found is None else json_response(call.body(found))
        stream = await call.run.start()
        if request.stream:
            return EventStream(call.chunks(stream), deadline.watch([stream]))
        outputs = await until_disconnect(http, lambda: deadline.wait(final_outputs([stream])))
        return (
            Response(status_code=499) if outputs is None else json_response(call.body(outputs[0]))
        )

    return routes


class _Call:
    def __init__(self, serving: Serving, request: ChatCompletionRequest, id: str) -> None:
        self._serving = serving
        self._request = request
        self._id = id
        self._created = now()
        self._model = serving.reported(request.model)
        self._logprobs = LogprobFormatter(
            serving.llm.token_text, request.return_tokens_as_token_ids, request.logprob_token_ids
        )
        self.run = ChatRun(serving, request, id)
        last = request.messages[-1]
        self._goes_on = not request.add_generation_prompt and isinstance(last.get("role"), str)
        self._role = last["role"] if self._goes_on else serving.settings.response_role

    def body(self, output: RequestOutput) -> dict[str, Any]:
        self.run.count(output)
        body = self._head("chat.completion") | {
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": self.run.usage.body(),
        }
        if self._request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._logprobs.prompt(output.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message = {
            "role": self._role,
            "content": self._echoed() + completion.text,
            "refusal": None,
        }
        if self.run.parses(completion):
            found = MessageFields(is_delta=False)
            found.add(self.run.pieces(completion))
            message |= {"content": self._echoed() + found.content}
            if self._serving.reasoning is not None:
                message["reasoning"] = found.reasoning or None
            if found.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = found.tool_calls()
        return {"index": completion.index, "message": message} | self._common(completion)

    def _common(self, completion: CompletionOutput) -> dict[str, Any]:
        num_top = self._request.num_logprobs
        fields: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": self.run.finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if num_top is not None and completion.logprobs is not None:
            fields["logprobs"] = self._logprobs.chat(
                completion.logprobs, completion.token_ids, num_top
            )
        if self._request.return_token_ids:
            fields["token_ids"] = completion.token_ids
        return fields

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        if not self.run.parses(completion):
            return {"content": completion.text} if completion.text else {}
        fields = MessageFields(is_delta=True)
        fields.add(self.run.pieces(completion))
        return fields.delta()

    def _echoed(self) -> str:
        """The message that the answer goes on with."""
        if not (self._request.echo and self._goes_on):
            return ""
        return self._request.template_messages()[-1].get("content") or ""

    async def chunks(self, stream: RequestStream) -> Chunks:
        request, usage = self._request, self.run.usage
        include_usage = request.include_usage or self._serving.settings.enable_force_include_usage
        head = self._head("chat.completion.chunk") | ({"usage": None} if include_usage else {})
        begun = False
        async for output in stream:
            if not begun:
                begun = True
                yield self._first_chunk(head, output)
            self.run.count(output)
            choices = [
                {"index": completion.index, "delta": delta, **self._common(completion)}
                for completion in output.outputs
                if (delta := self._delta(completion))
                or completion.finish_reason
                or (
                    (request.num_logprobs is not None or request.return_token_ids)
                    and completion.token_ids
                )
            ]
            if choices:
                chunk = head | {"choices": choices}
                yield chunk | {"usage": usage.body()} if request.continuous_usage else chunk
        if include_usage:
            yield head | {"choices": [], "usage": usage.body()}

    def _first_chunk(self, head: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "delta": {"role": self._role, "content": self._echoed()},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(self._request.n or 1)
        ]
        chunk = head | {"choices": choices}
        if self._request.continuous_usage:
            chunk["usage"] = self.run.usage.body()
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk
