"""`POST /v1/completions`: one or several prompts, continued as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.sampling_params import RequestOutputKind
from jaxinfer.server.beam_search import beam_search, beam_search_params
from jaxinfer.server.deadline import Deadline
from jaxinfer.server.errors import json_response
from jaxinfer.server.logprobs import LogprobFormatter
from jaxinfer.server.protocol.completion import CompletionRequest
from jaxinfer.server.serving import (
    Serving,
    final_outputs,
    merged,
    now,
    request_id,
    until_disconnect,
)
from jaxinfer.server.streaming import RESPONSES, Chunks, EventStream
from jaxinfer.server.usage import Usage

DEFAULT_MAX_TOKENS = 16


def router(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None, responses=RESPONSES)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        serving.check_model(request.model)
        call = _Call(serving, request, f"cmpl-{request_id(http, request)}")
        deadline = Deadline.of(http, request)
        if request.use_beam_search:
            found = await until_disconnect(http, lambda: deadline.wait(call.beams()))
            return Response(status_code=499) if found is None else json_response(call.body(found))
        streams = await call.start()
        if request.stream:
            return EventStream(call.chunks(streams), deadline.watch(streams))
        outputs = await until_disconnect(http, lambda: deadline.wait(final_outputs(streams)))
        return Response(status_code=499) if outputs is None else json_response(call.body(outputs))

    return routes


class _Call:
    """One HTTP request. Choice `i * n + k` is the k-th completion of prompt i."""

    def __init__(self, serving: Serving, request: CompletionRequest, id: str) -> None:
        self._serving = serving
        self._request = request
        self._id = id
        self._n = request.n or 1
        self._created = now()
        self._model = serving.reported(request.model)
        self._logprobs = LogprobFormatter(
            serving.llm.token_text, request.return_tokens_as_token_ids, request.logprob_token_ids
        )
        self._scores_only = request.max_tokens == 0

    async def start(self) -> list[RequestStream]:
        request, serving = self._request, self._serving
        defaults = serving.llm.processor.sampling_defaults
        more: dict[str, Any] = {}
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            more["prompt_logprobs"] = request.logprobs
        limit = request.max_tokens
        if limit is None:
            limit = defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
        params = serving.sampling_params(
            request,
            max_tokens=max(limit, 1),
            logprobs=request.logprobs,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            **more,
        )
        prepared = [
            await serving.prepare(
                request,
                prompt,
                params,
                f"{self._id}-{i}",
                add_special_tokens=request.add_special_tokens,
                limit_name="max_tokens",
                prompt_field="prompt",
            )
            for i, prompt in enumerate(request.prompts)
        ]
        self._usage = Usage(sum(len(p.prompt_token_ids) for p in prepared))
        return serving.submit(prepared)

    async def beams(self) -> list[RequestOutput]:
        request = self._request
        limit = request.max_tokens
        if limit is None:
            limit = self._serving.llm.processor.sampling_defaults.get(
                "max_tokens", DEFAULT_MAX_TOKENS
            )
        search = beam_search_params(self._serving, request, limit)
        outputs = await beam_search(
            self._serving,
            request,
            request.prompts,
            search,
            self._id,
            add_special_tokens=request.add_special_tokens,
            limit_name="max_tokens",
            prompt_field="prompt",
        )
        self._usage = Usage(sum(len(output.prompt_token_ids) for output in outputs))
        return outputs

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            if self._scores_only:
                output.outputs = [
                    CompletionOutput(
                        c.index, "", [], logprobs=c.logprobs and [], finish_reason="length"
                    )
                    for c in output.outputs
                ]
            self._usage.add(i, output)
            choices += [self._choice(i, output, completion) for completion in output.outputs]
        return self._head() | {"choices": choices, "usage": self._usage.body()}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        request = self._request
        text, token_ids = completion.text, completion.token_ids
        positions: list[Any] = list(completion.logprobs or ())
        if request.echo:
            text = self._prompt_text(output) + text
            token_ids = output.prompt_token_ids + token_ids
            if request.num_logprobs is not None:
                positions = [*self._prompt_positions(output), *positions]
        choice: dict[str, Any] = {
            "index": prompt_index * self._n + completion.index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.num_logprobs is not None:
            choice["logprobs"] = self._logprobs.completion(
                positions, token_ids, request.num_logprobs
            )
        if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._logprobs.prompt(output.prompt_logprobs)
        if request.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = completion.token_ids
        return choice

    def _prompt_positions(self, output: RequestOutput) -> list[Any]:
        return output.prompt_logprobs or [None] * len(output.prompt_token_ids)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._request.truncate_prompt_tokens is None:
            return output.prompt
        return self._serving.llm.get_tokenizer().decode(
            output.prompt_token_ids, skip_special_tokens=False
        )

    async def chunks(self, streams: Sequence[RequestStream]) -> Chunks:
        request, usage = self._request, self._usage
        include_usage = request.include_usage or self._serving.settings.enable_force_include_usage
        head = self._head() | ({"usage": None} if include_usage else {})
        offsets: dict[int, int] = {}
        async for i, output in merged(streams):
            if self._scores_only:
                for completion in output.outputs:
                    completion.text, completion.token_ids = "", []
            usage.add(i, output)
            choices = []
            for completion in output.outputs:
                index = i * self._n + completion.index
                is_first = index not in offsets
                choice = self._delta(index, output, completion, is_first, offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + len(choice["text"])
                if choice["text"] or completion.token_ids or completion.finish_reason:
                    choices.append(choice)
            if choices:
                chunk = head | {"choices": choices}
                yield chunk | {"usage": usage.body()} if request.continuous_usage else chunk
        if include_usage:
            yield head | {"choices": [], "usage": usage.body()}

    def _delta(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        is_first: bool,
        offset: int,
    ) -> dict[str, Any]:
        request = self._request
        text = completion.text
        if request.echo and is_first:
            text = self._prompt_text(output) + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.num_logprobs is not None and completion.logprobs:
            choice["logprobs"] = self._logprobs.completion(
                completion.logprobs, completion.token_ids, request.num_logprobs, offset
            )
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice
