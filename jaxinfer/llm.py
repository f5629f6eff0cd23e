"""`LLM`: a model that completes lists of prompts, in the caller's process and thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tqdm import tqdm

from jaxinfer.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from jaxinfer.engine.client import InprocClient
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.messages import FinishReason
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import Engine, build_engine
from jaxinfer.frontend.metrics import EngineMetrics
from jaxinfer.frontend.output_processor import OutputProcessor
from jaxinfer.frontend.processor import PreparedRequest, Prompt, TextPrompt
from jaxinfer.frontend.progress import BatchProgress
from jaxinfer.lora_request import LoRARequest
from jaxinfer.metrics import Metric
from jaxinfer.outputs import RequestFailedError, RequestOutput
from jaxinfer.pooling_llm import PoolingMethods, pooling_processor, refuse_pooling
from jaxinfer.prompts import prompt_list
from jaxinfer.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.frontend.tokenizer import Tokenizer

type Message = dict[str, Any]
type Adapters = LoRARequest | Sequence[LoRARequest | None] | None
type Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingMethods):
    """Takes the arguments of `EngineArgs`. A context manager; `shutdown` releases the device.

    Not for use by several threads at once.
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
        self._pooling = pooling_processor(engine.config, engine.processor, engine.tokenizer)
        self._outputs = OutputProcessor(engine.token_text)
        self._client = InprocClient(engine.core)
        self._metrics = EngineMetrics(
            engine.config, lambda: self._outputs.num_unfinished, engine.core.num_blocks
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        *,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the prompts' order.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" (and "cache_salt":
        only prompts of the same salt share cached prefixes). `sampling_params`: one for all, one per prompt, or None
        for the model's own defaults. Lower priorities go first, if the engine schedules by priority. `lora_request`: the
        adapter that the model runs with, one for all, or one or None per prompt.

        Raises `ValueError` before anything starts when one of the prompts can't be run, and `RequestFailedError`
        when all have ended but some with an error.
        """
        prompts = prompt_list(prompts)
        return self._run(
            self._prepare(
                prompts, sampling_params, priority, lora_request, add_special_tokens=True
            ),
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, formatted by the model's chat template or the one given.

        `cache_salt`, one for all or one per conversation: only those of the same salt share cached prefixes.
        `lora_request`: see `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        template_args: dict[str, Any] = dict(chat_template_kwargs or {})
        template_args["add_generation_prompt"] = add_generation_prompt
        if continue_final_message:
            template_args["continue_final_message"] = True
        if chat_template is not None:
            template_args["chat_template"] = chat_template
        if tools is not None:
            template_args["tools"] = tools
        salts = _per_prompt("cache_salt", cache_salt, len(conversations))
        prompts: list[Prompt] = []
        for conversation, salt in zip(conversations, salts, strict=True):
            text = self._tokenizer.apply_chat_template(list(conversation), **template_args)
            prompts.append(text if salt is None else TextPrompt(prompt=text, cache_salt=salt))
        return self._run(
            self._prepare(
                prompts, sampling_params, priority, lora_request, add_special_tokens=False
            ),
            use_tqdm,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely completions of each prompt by beam search, best first.

        All beams of all prompts go forward together, one token a step; what they share is computed once, by the prefix
        cache. All run with the adapter `lora_request`. Raises `ValueError` as `generate`, and where `max_logprobs` is below twice the `beam_width`.
        """
        refuse_pooling(self._pooling, "beam_search()")
        eos, max_len = self._processor.eos_token_ids, self.config.model.max_model_len
        searches = [
            BeamSearch.of(self._processor.prepare(prompt), params, eos, max_len)
            for prompt in prompt_list(prompts)
        ]
        for _ in tqdm(range(params.max_tokens)) if use_tqdm else range(params.max_tokens):
            open_ends = [(search, search.prompts) for search in searches]
            beams = [beam for _, beams in open_ends for beam in beams]
            if not beams:
                break
            outputs = iter(
                self.generate(
                    beams, searches[0].step_params, use_tqdm=False, lora_request=lora_request
                )
            )
            for search, mine in open_ends:
                if mine:
                    search.advance(list(islice(outputs, len(mine))))
        return [search.result(self._tokenizer.decode) for search in searches]

    def get_metrics(self) -> list[Metric]:
        """What was counted since the engine began, under the names of the server's `/metrics`: `Counter`, `Gauge`,
        `Vector` and `Histogram` of `jaxinfer.metrics`."""
        return self._metrics.snapshot()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own, from its generation config."""
        return self._processor.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes: requests that come from now on compute their prompts anew. True: it is done."""
        self._client.call("reset_prefix_cache").result()
        return True

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter for requests that come from now on, again if it is known. Requests bring theirs along, so this
        is only for having it read before. Raises `ValueError` for one that doesn't fit the model. True: it is there."""
        return self._client.call("add_lora", *msgspec.structs.astuple(lora_request)).result()

    def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this `lora_int_id`. False: there was none."""
        return self._client.call("remove_lora", lora_id).result()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory, whatever else is used. Raises `ValueError` for one that isn't there."""
        return self._client.call("pin_lora", lora_id).result()

    def list_loras(self) -> set[int]:
        """The `lora_int_id`s of the adapters that were read."""
        return {number for _, number, _ in self._client.call("list_loras").result()}

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory for something else (a training step). At level 1 the host keeps the weights; at level
        2 they are dropped, and read from the checkpoint again. Cached prefixes are forgotten.

        Raises `ValueError` for another level, and `generate` does until `wake_up`.
        """
        self._client.call("sleep", level).result()
        self._metrics.slept(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `sleep` gave away: "weights", "kv_cache", or both (None)."""
        self._client.call("wake_up", None if tags is None else list(tags)).result()
        if not self.is_sleeping():
            self._metrics.slept(0)

    def is_sleeping(self) -> bool:
        return self._client.call("is_sleeping").result()

    def shutdown(self) -> None:
        self._client.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _prepare(
        self,
        prompts: list[Prompt],
        params: Params,
        priority: int | Sequence[int] | None,
        adapters: Adapters,
        add_special_tokens: bool,
    ) -> list[PreparedRequest]:
        refuse_pooling(self._pooling, "generate()")
        each_params = _per_prompt("sampling_params", params, len(prompts))
        priorities = _per_prompt("priority", 0 if priority is None else priority, len(prompts))
        if not isinstance(adapters, LoRARequest):
            adapters = _per_prompt("lora_request", adapters, len(prompts))
        else:
            adapters = [adapters] * len(prompts)
        prepared = []
        for i, prompt in enumerate(prompts):
            try:
                prepared.append(
                    self._processor.prepare(
                        prompt,
                        each_params[i],
                        priority=priorities[i],
                        add_special_tokens=add_special_tokens,
                        lora_request=adapters[i],
                    )
                )
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                raise ValueError(f"prompt {i}: {error}") from error
        return prepared

    def _run(
        self, prepared: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        progress = BatchProgress(len(prepared), use_tqdm)

        def take(index: int, output: RequestOutput) -> None:
            results[index] = output
            self._metrics.request_output(prepared[index], output)
            progress.finish_prompt(len(output.prompt_token_ids))

        try:
            for i, request in enumerate(prepared):
                self._metrics.request_added(request)
                self._outputs.add(request, partial(take, i), RequestOutputKind.FINAL_ONLY)
            for request in self._pooling.in_order(prepared) if self._pooling else prepared:
                for core_request in request.core_requests:
                    self._client.add_request(core_request)
            while self._outputs.num_unfinished:
                if not self._client.has_unfinished():
                    raise EngineDeadError("The engine core has lost requests.")
                step = self._client.get_output()
                progress.add_written(len(step.token_ids))
                self._metrics.step(step)
                to_abort = self._outputs.process(step)
                if to_abort:
                    self._client.abort_requests(to_abort)
        except BaseException:
            self._client.abort_requests(self._outputs.abort(self._outputs.requests()))
            raise
        finally:
            progress.close()
        return _checked([results[i] for i in range(len(prepared))])


def _per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise ValueError(
            f"{name} must be one for all or one per prompt ({num_prompts}), got {len(value)}."
        )
    return list(value)


def _checked(outputs: list[RequestOutput]) -> list[RequestOutput]:
    failures = {
        i: str(completion.stop_reason)
        for i, output in enumerate(outputs)
        for completion in output.outputs
        if completion.finish_reason == str(FinishReason.ERROR)
    }
    if failures:
        raise RequestFailedError(failures, outputs)
    return outputs
