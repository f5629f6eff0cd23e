"""`use_beam_search`: the n best completions by beam search, for completions and chat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxinfer.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import BadRequest
from jaxinfer.server.protocol.common import GenerationRequest
from jaxinfer.server.serving import Serving

_EXCLUDED = (
    "stream",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "vllm_xargs",
)
"""Fields that would change which sequences are the likeliest, or how they come."""


def beam_search_params(
    serving: Serving, request: GenerationRequest, max_tokens: int | None
) -> BeamSearchParams:
    """`n` is the beam's width; without `max_tokens`, the context is the limit. Raises `BadRequest` for what beam search
    can't be combined with, and for a beam that the engine's `max_logprobs` doesn't allow."""
    for name in _EXCLUDED:
        if getattr(request, name, None):
            raise BadRequest(f"{name} can't be combined with use_beam_search.", param=name)
    if (field := request.structured_field) is not None:
        raise BadRequest(f"{field} can't be combined with use_beam_search.", param=field)
    widest = serving.llm.config.model.max_logprobs // 2
    width = 1 if request.n is None else request.n
    if width > widest:
        raise BadRequest(
            f"n must be at most {widest} with use_beam_search, half of the engine's max_logprobs, got {width}.",
            param="n",
        )
    try:
        return BeamSearchParams(
            beam_width=width,
            max_tokens=serving.max_model_len if max_tokens is None else max_tokens,
            ignore_eos=request.ignore_eos,
            length_penalty=request.length_penalty,
            include_stop_str_in_output=request.include_stop_str_in_output,
        )
    except ValueError as error:
        text = str(error).replace("beam_width", "n")
        raise BadRequest(text, param=text.split(" ", 1)[0]) from error


async def beam_search(
    serving: Serving,
    request: GenerationRequest,
    prompts: Sequence[str | list[int]],
    params: BeamSearchParams,
    request_id: str,
    **prepare: Any,
) -> list[RequestOutput]:
    """The best sequences of each prompt, as completions of it. `prepare`: as for `Serving.prepare`."""
    limits = SamplingParams(max_tokens=params.max_tokens)
    prepared = [
        await serving.prepare(request, prompt, limits, f"{request_id}-{i}", **prepare)
        for i, prompt in enumerate(prompts)
    ]
    serving.check_queue(len(prepared) * params.beam_width)
    searches = [
        asyncio.ensure_future(
            serving.llm.beam_search(
                _prompt(one),
                params,
                request.priority,
                lora_request=one.core_requests[0].lora,
            )
        )
        for one in prepared
    ]
    try:
        found = await asyncio.gather(*searches)
    finally:
        for search in searches:
            search.cancel()
    return [_output(*pair) for pair in zip(prepared, found, strict=True)]


def _prompt(prepared: PreparedRequest) -> Any:
    salt = prepared.core_requests[0].cache_salt
    ids = {"prompt_token_ids": prepared.prompt_token_ids}
    return ids if salt is None else ids | {"cache_salt": salt}


def _output(prepared: PreparedRequest, found: BeamSearchOutput) -> RequestOutput:
    num_prompt = len(prepared.prompt_token_ids)
    return RequestOutput(
        request_id=prepared.request_id,
        prompt=prepared.prompt,
        prompt_token_ids=prepared.prompt_token_ids,
        outputs=[_completion(i, s, num_prompt) for i, s in enumerate(found.sequences)],
        finished=True,
    )


def _completion(index: int, sequence: BeamSearchSequence, num_prompt: int) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=sequence.text or "",
        token_ids=sequence.tokens[num_prompt:],
        cumulative_logprob=sequence.cum_logprob,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
