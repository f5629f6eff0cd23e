"""LLM inference in JAX. Public names load what they need when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxinfer.engine.errors import EngineDeadError
    from jaxinfer.engine_args import EngineArgs
    from jaxinfer.flat_logprobs import FlatLogprobs
    from jaxinfer.llm import LLM
    from jaxinfer.logits_processors import LogitsProcessor, RowState
    from jaxinfer.lora_request import LoRARequest
    from jaxinfer.outputs import (
        CompletionOutput,
        Logprob,
        RequestFailedError,
        RequestMetrics,
        RequestOutput,
    )
    from jaxinfer.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxinfer.pooling_params import PoolingParams
    from jaxinfer.sampling_params import RequestOutputKind, SamplingParams
    from jaxinfer.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "FlatLogprobs",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RowState",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "jaxinfer.llm",
    "AsyncLLM": "jaxinfer.async_llm",
    "EngineArgs": "jaxinfer.engine_args",
    "EngineDeadError": "jaxinfer.engine.errors",
    "FlatLogprobs": "jaxinfer.flat_logprobs",
    "LoRARequest": "jaxinfer.lora_request",
    "LogitsProcessor": "jaxinfer.logits_processors",
    "RowState": "jaxinfer.logits_processors",
    "PoolingParams": "jaxinfer.pooling_params",
    "RequestOutputKind": "jaxinfer.sampling_params",
    "SamplingParams": "jaxinfer.sampling_params",
    "StructuredOutputsParams": "jaxinfer.structured_outputs",
    "BeamSearchOutput": "jaxinfer.beam_search",
    "BeamSearchParams": "jaxinfer.beam_search",
    "BeamSearchSequence": "jaxinfer.beam_search",
} | dict.fromkeys(
    ("CompletionOutput", "Logprob", "RequestFailedError", "RequestMetrics", "RequestOutput"),
    "jaxinfer.outputs",
)
_MODULES |= dict.fromkeys(
    (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "jaxinfer.pooling_outputs",
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jaxinfer")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
