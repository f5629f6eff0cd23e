"""Logprobs on their way out: from a step's arrays to the lists of the requests that asked for them."""

from __future__ import annotations

from jaxinfer.engine.messages import TokenLogprobs
from jaxinfer.engine.plan import LogprobArrays
from jaxinfer.engine.request import Request


def token_logprobs(arrays: LogprobArrays, position: int, num_top: int) -> TokenLogprobs:
    """The chosen token and the `num_top` best ones at one position; -1 for all that there are."""
    stop = None if num_top < 0 else num_top + 1
    return TokenLogprobs(
        arrays.token_ids[position, :stop].tolist(),
        arrays.logprobs[position, :stop].tolist(),
        int(arrays.ranks[position]),
    )


def new_prompt_logprobs(
    request: Request, arrays: LogprobArrays, num_computed: int
) -> list[TokenLogprobs]:
    """Those of the positions after `num_computed` that belong to the prompt and haven't been given yet: a preempted
    request computes its prompt again, and its output along with it."""
    num_top = request.sampling_params.prompt_logprobs
    if num_top is None:
        return []
    first = max(request.num_prompt_logprobs_sent, num_computed)
    last = min(num_computed + len(arrays.ranks), len(request.prompt_token_ids) - 1)
    request.num_prompt_logprobs_sent = max(first, last)
    return [token_logprobs(arrays, i - num_computed, num_top) for i in range(first, last)]
