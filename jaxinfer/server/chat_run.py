"""A conversation on its way through the engine: what every endpoint that continues one has in common."""

from __future__ import annotations

from typing import Any

from jaxinfer.engine.messages import Thinking
from jaxinfer.frontend.tool_grammar import answer_or_calls
from jaxinfer.frontend.tool_parsers import ContentPiece
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request_stream import RequestStream
from jaxinfer.sampling_params import RequestOutputKind
from jaxinfer.server.beam_search import beam_search, beam_search_params
from jaxinfer.server.chat_prompt import chat_prompt
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.message_parser import MessageParser, MessagePiece, tool_parser
from jaxinfer.server.protocol.chat import ChatCompletionRequest
from jaxinfer.server.reasoning import ThoughtCounter
from jaxinfer.server.serving import Serving
from jaxinfer.server.usage import Usage


class ChatRun:
    """`usage` counts what `start` or `beams` began, and has to be told of the outputs. Raises `BadRequest` for what this
    server can't do."""

    def __init__(self, serving: Serving, request: ChatCompletionRequest, id: str) -> None:
        self._serving = serving
        self._request = request
        self._id = id
        self.usage = Usage(0)
        self._prompt = self._rendered()
        self._thinks = self._begins_with_thoughts()
        choices = range(request.n or 1)
        self._parsers = [self._parser() for _ in choices]
        reasoning = serving.reasoning
        self._counters = [reasoning and ThoughtCounter(reasoning, self._thinks) for _ in choices]

    def _rendered(self) -> str:
        request = self._request
        variables: dict[str, Any] = {}
        hidden = self._serving.settings.exclude_tools_when_tool_choice_none
        if request.tools and not (hidden and request.chosen.mode == "none"):
            variables["tools"] = request.tools
        if request.documents is not None:
            variables["documents"] = request.documents
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
            if request.reasoning_effort == "none":
                variables["enable_thinking"] = False
        return chat_prompt(self._serving, request, **variables)

    def _begins_with_thoughts(self) -> bool | None:
        request, reasoning = self._request, self._serving.reasoning
        if reasoning is None:
            return False
        begun = None
        if request.continue_final_message:
            begun = request.template_messages()[-1].get("content") or ""
        return reasoning.parser.after_prompt(self._prompt, begun)

    def _parser(self) -> MessageParser | None:
        """None where the message is what the model writes."""
        serving, request = self._serving, self._request
        tools = tool_parser(serving, request)
        if serving.reasoning is None and tools is None:
            return None
        return MessageParser(
            serving.reasoning and serving.reasoning.parser(self._thinks),
            tools,
            one_call=request.parallel_tool_calls is False,
            keeps_thoughts=request.include_reasoning,
        )

    async def start(self) -> RequestStream:
        request, serving = self._request, self._serving
        limit_name, limit = self._limit()
        more: dict[str, Any] = {"skip_special_tokens": False} if self._needs_special_tokens else {}
        if (grammar := self._answer_or_calls()) is not None:
            more["structured_outputs"] = {"grammar": grammar}
        params = serving.sampling_params(
            request,
            max_tokens=limit,
            logprobs=None if request.logprob_token_ids else request.num_logprobs,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            **more,
        )
        prepared = await serving.prepare(
            request,
            self._prompt,
            params,
            self._id,
            add_special_tokens=request.add_special_tokens,
            limit_name=limit_name,
            prompt_field="messages",
            thinking=self._thinking(params.structured_outputs is not None),
        )
        self.usage.num_prompt = len(prepared.prompt_token_ids)
        return serving.submit([prepared])[0]

    def _answer_or_calls(self) -> str | None:
        """Where the answer has to be JSON and the model may call tools instead, what allows it both."""
        request, parser = self._request, self._serving.tool_parser
        if request.chosen.mode != "auto" or parser is None or parser.call_tag is None:
            return None
        if self._serving.is_special(parser.call_tag):
            return None
        wanted = request.structured() or {}
        schema = {"type": "object"} if wanted == {"json_object": True} else wanted.get("json")
        if schema is None or len(wanted) > 1:
            return None
        try:
            return answer_or_calls(schema, parser.call_tag)
        except ValueError as error:
            raise self._serving.explain(error, request, "messages") from error

    def count_prompt(self) -> int:
        """The prompt's tokens."""
        tokenizer, special = self._serving.llm.get_tokenizer(), self._request.add_special_tokens
        try:
            return len(tokenizer.encode(self._prompt, add_special_tokens=special))
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from error

    @property
    def _needs_special_tokens(self) -> bool:
        """Whether the parsers have to see them."""
        serving = self._serving
        marks: list[str] = []
        if self._request.chosen.mode == "auto" and serving.tool_parser is not None:
            marks += serving.tool_parser.marks
        if serving.reasoning is not None:
            marks += [serving.reasoning.parser.start_token, serving.reasoning.parser.end_token]
        return any(serving.is_special(mark) for mark in marks)

    def _thinking(self, has_grammar: bool) -> Thinking | None:
        budget, reasoning = self._request.thinking_token_budget, self._serving.reasoning
        if reasoning is None:
            if budget is not None:
                raise BadRequest(
                    "thinking_token_budget: this server looks for no thoughts (--reasoning-parser).",
                    param="thinking_token_budget",
                )
            return None
        if budget is None and not has_grammar:
            return None
        return reasoning.thinking(self._thinks, budget)

    def _limit(self) -> tuple[str, int | None]:
        name, limit = self._request.limit
        if limit is None:
            limit = self._serving.llm.processor.sampling_defaults.get("max_tokens")
        return name, limit

    async def beams(self) -> RequestOutput:
        limit_name, limit = self._limit()
        [output] = await beam_search(
            self._serving,
            self._request,
            [self._prompt],
            beam_search_params(self._serving, self._request, limit),
            self._id,
            add_special_tokens=self._request.add_special_tokens,
            limit_name=limit_name,
            prompt_field="messages",
        )
        self.usage.num_prompt = len(output.prompt_token_ids)
        return output

    def count(self, output: RequestOutput) -> None:
        self.usage.add(0, output)
        if self._serving.reasoning is not None:
            for completion in output.outputs:
                counter = self._counters[completion.index]
                assert counter is not None
                counter.add(completion.token_ids)
            self.usage.num_reasoning = sum(c.num_tokens for c in self._counters if c is not None)

    def parses(self, completion: CompletionOutput) -> bool:
        """Whether there is more to the completion than its text."""
        return self._parsers[completion.index] is not None

    def pieces(self, completion: CompletionOutput) -> list[MessagePiece]:
        """What is new in a DELTA output, or all of a final one."""
        parser = self._parsers[completion.index]
        if parser is None:
            return [ContentPiece(completion.text)] if completion.text else []
        pieces = parser.feed(completion.text)
        return pieces if completion.finish_reason is None else pieces + parser.finish()

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """To be asked after `pieces`. OpenAI's API keeps "stop" for a call that the client has asked for by name."""
        parser = self._parsers[completion.index]
        called = parser is not None and parser.num_calls and self._request.chosen.mode != "named"
        reason = completion.finish_reason
        return "tool_calls" if called and reason == "stop" else reason
