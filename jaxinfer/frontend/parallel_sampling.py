"""`n` completions of a prompt are `n` requests to the core, which share the prompt through its prefix cache."""

from __future__ import annotations

import msgspec

from jaxinfer.engine.messages import EngineCoreRequest

_SEED_BITS = 64


def expand(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The request itself, or its `n` children: child i samples with `seed + i`, and the first alone scores the
    prompt."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}/{i}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _wrap(params.seed + i),
                prompt_logprobs=params.prompt_logprobs if i == 0 else None,
            ),
        )
        for i in range(params.n)
    ]


def _wrap(seed: int) -> int:
    """Into the signed 64-bit range, around -1, which means no seed."""
    half = 1 << (_SEED_BITS - 1)
    wrapped = (seed + half) % (1 << _SEED_BITS) - half
    return half - 1 if wrapped == -1 else wrapped
