"""What `LLM` and `AsyncLLM` have for models that make vectors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.errors import WrongRunner
from jaxinfer.engine.messages import PoolingTask
from jaxinfer.frontend.pooling import PoolingProcessor
from jaxinfer.frontend.processor import PreparedRequest, Processor, Prompt
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.outputs import RequestOutput
from jaxinfer.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from jaxinfer.pooling_params import PoolingParams
from jaxinfer.prompts import prompt_list
from jaxinfer.request_stream import RequestStream
from jaxinfer.scoring import Texts, data_of, score_plan

type Progress = bool | Callable[..., Any]


def require_pooling(pooling: PoolingProcessor | None, what: str) -> PoolingProcessor:
    if pooling is None:
        raise WrongRunner(
            f"{what} needs an engine that makes vectors; this one writes tokens. Start it with runner='pooling'."
        )
    return pooling


def refuse_pooling(pooling: PoolingProcessor | None, what: str) -> None:
    if pooling is not None:
        raise WrongRunner(
            f"{what} needs an engine that writes tokens (runner='generate'); this one makes vectors: "
            f"{', '.join(pooling.config.tasks)}."
        )


def pooling_processor(
    config: EngineConfig, processor: Processor, tokenizer: Tokenizer
) -> PoolingProcessor | None:
    return None if config.pooler is None else PoolingProcessor(config, processor, tokenizer)


class PoolingMethods:
    """Of `LLM`."""

    _pooling: PoolingProcessor | None

    def _run(self, prepared: list[PreparedRequest], use_tqdm: Progress) -> list[RequestOutput]:
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Progress = True,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The model's numbers for every prompt, in the prompts' order, as float32 arrays: a vector each, or with the tasks
        "token_embed" and "token_classify" one for each token.

        Prompts are as those of `generate`. `truncate_prompt_tokens` overrules that of `pooling_params`. Raises
        `ValueError` for what the model can't do, before anything starts.
        """
        return [
            PoolingRequestOutput(
                output.request_id,
                PoolingOutput(data),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output, data in self._encode(
                "encode()",
                prompts,
                pooling_params,
                pooling_task,
                use_tqdm,
                truncate_prompt_tokens,
                priority,
            )
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Every prompt's embedding. See `encode`."""
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(data.tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output, data in self._encode(
                "embed()",
                prompts,
                pooling_params,
                "embed",
                use_tqdm,
                truncate_prompt_tokens,
                priority,
            )
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ClassificationRequestOutput]:
        """Every prompt's probability of each class. See `encode`."""
        return [
            ClassificationRequestOutput(
                output.request_id,
                ClassificationOutput(data.tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output, data in self._encode(
                "classify()",
                prompts,
                pooling_params,
                "classify",
                use_tqdm,
                truncate_prompt_tokens,
                priority,
            )
        ]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well the texts of each pair go together: one text with each of `data_2`, or as many with each other.

        A cross-encoder (a model for one class) reads both at once; of a model for embeddings, it is their cosine. Raises
        `ValueError` for other models.
        """
        pooling = require_pooling(self._pooling, "score()")
        params = _with_truncation(pooling_params, truncate_prompt_tokens)
        plan = score_plan(pooling, data_1, data_2, params, priority=priority)
        outputs = self._run(plan.prepared, use_tqdm)
        return plan.answers(outputs)

    def _encode(
        self,
        what: str,
        prompts: Any,
        params: PoolingParams | None,
        task: PoolingTask | None,
        use_tqdm: Progress,
        truncate_prompt_tokens: int | None,
        priority: int,
    ) -> list[tuple[RequestOutput, np.ndarray]]:
        pooling = require_pooling(self._pooling, what)
        complete = pooling.complete(_with_truncation(params, truncate_prompt_tokens), task)
        prepared = pooling.prepare(prompt_list(prompts), complete, priority=priority)
        return [
            (output, pooling.answer(data_of(output), complete))
            for output in self._run(prepared, use_tqdm)
        ]


class AsyncPoolingMethods:
    """Of `AsyncLLM`."""

    pooling: PoolingProcessor | None

    def submit(self, prepared: PreparedRequest) -> RequestStream:
        raise NotImplementedError

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Yields one output, see `LLM.encode`. To leave the generator early aborts the request."""
        pooling = require_pooling(self.pooling, "encode()")
        complete = pooling.complete(pooling_params, None)
        [prepared] = pooling.prepare([prompt], complete, request_id, priority)
        stream = self.submit(prepared)
        try:
            output = await anext(stream)
        finally:
            stream.close()
        data = pooling.answer(data_of(output), complete)
        yield PoolingRequestOutput(
            output.request_id,
            PoolingOutput(data),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )


def _with_truncation(params: PoolingParams | None, keep: int | None) -> PoolingParams | None:
    if keep is None:
        return params
    import msgspec

    changed = msgspec.structs.replace(params or PoolingParams(), truncate_prompt_tokens=keep)
    changed.__post_init__()
    return changed
