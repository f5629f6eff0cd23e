"""Requests for vectors: from what a caller asks to what the core can run, and from the model's numbers to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import Pooling, PoolingTask
from jaxinfer.frontend.processor import PreparedRequest, Processor, Prompt
from jaxinfer.frontend.text_encoding import EncodedText, encode_pair, encode_texts
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.pooler_config import PoolerConfig
from jaxinfer.pooling_params import PoolingParams
from jaxinfer.sampling_params import RequestOutputKind, SamplingParams


class PoolingProcessor:
    """Validates and tokenizes; holds no requests."""

    def __init__(self, config: EngineConfig, processor: Processor, tokenizer: Tokenizer) -> None:
        assert config.pooler is not None
        self.config: PoolerConfig = config.pooler
        self._max_len = config.model.max_model_len
        self._model = config.model.served_model_name or config.model.model
        self._processor = processor
        self._tokenizer = tokenizer

    def complete(self, params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
        """A copy with nothing left open but `dimensions`. Raises `ValueError` for what the model can't do."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise ValueError(f"pooling_params must be PoolingParams, got {params!r}.")
        complete = msgspec.structs.replace(params)
        complete.__post_init__()
        if task is not None and params.task not in (None, task):
            raise ValueError(f"task {params.task!r} is not what is asked for, {task!r}.")
        complete.task = task or params.task or self.config.tasks[0]  # type: ignore[assignment]
        if complete.task not in self.config.tasks:
            raise ValueError(
                f"task {complete.task!r} is not what the model {self._model} is for; it has "
                f"{', '.join(self.config.tasks)}."
            )
        if complete.use_activation is None:
            # Only whole prompts' embeddings are normalised by default, as the vectors of tokens are looked at in many ways.
            is_token_embed = complete.task == "token_embed"
            complete.use_activation = self.config.use_activation and not is_token_embed
        keep = complete.truncate_prompt_tokens
        if keep is not None:
            if keep > self._max_len:
                raise ValueError(
                    f"truncate_prompt_tokens must be at most max_model_len ({self._max_len}), got {keep}."
                )
            complete.truncate_prompt_tokens = self._max_len if keep == -1 else keep
        self._check_dimensions(complete)
        return complete

    def _check_dimensions(self, params: PoolingParams) -> None:
        wanted, config = params.dimensions, self.config
        if wanted is None:
            return
        if params.task not in ("embed", "token_embed"):
            raise ValueError(f"dimensions are for embeddings; this task is {params.task!r}.")
        if not config.is_matryoshka:
            raise ValueError(
                f"dimensions can't be chosen for the model {self._model}: it is not made for Matryoshka embeddings. "
                f"It has {config.embed_dim}."
            )
        if config.matryoshka_dimensions and wanted not in config.matryoshka_dimensions:
            allowed = ", ".join(map(str, config.matryoshka_dimensions))
            raise ValueError(f"dimensions must be one of {allowed}, got {wanted}.")
        if wanted > config.embed_dim:
            raise ValueError(f"dimensions must be at most {config.embed_dim}, got {wanted}.")

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> list[PreparedRequest]:
        """`params` are `complete`. Raises `ValueError` for prompts that are empty, too long or no prompts, by their number
        where there are several."""
        texts = {i: text for i, prompt in enumerate(prompts) if (text := _text(prompt))}
        encoded = dict(
            zip(
                texts,
                encode_texts(
                    self._tokenizer,
                    [self._cased(text) for text in texts.values()],
                    params.truncate_prompt_tokens,
                    add_special_tokens,
                ),
                strict=True,
            )
        )
        prepared = []
        for i, prompt in enumerate(prompts):
            made: Any = prompt
            if i in texts:
                made = {"prompt": texts[i], "prompt_token_ids": encoded[i].ids}
                if isinstance(prompt, dict) and "cache_salt" in prompt:
                    made["cache_salt"] = prompt["cache_salt"]
            one_id = request_id if request_id is None or len(prompts) == 1 else f"{request_id}-{i}"
            try:
                prepared.append(self._prepare(made, params, None, one_id, priority))
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                raise ValueError(f"prompt {i}: {error}") from error
        return prepared

    def prepare_pair(
        self,
        first: str,
        second: str,
        params: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> PreparedRequest:
        """For a model that reads both texts at once. Raises as `prepare`."""
        pair = self._encode_pair(first, second, params.truncate_prompt_tokens)
        return self._prepare(
            {"prompt_token_ids": pair.ids}, params, pair.second_text, request_id, priority
        )

    def _encode_pair(self, first: str, second: str, keep: int | None) -> EncodedText:
        if not (first and second):
            raise ValueError("prompt must not be empty: a pair has two texts.")
        return encode_pair(self._tokenizer, self._cased(first), self._cased(second), keep)

    def _cased(self, text: str) -> str:
        return text.lower() if self.config.lowercase else text

    def _prepare(
        self,
        prompt: Any,
        params: PoolingParams,
        second_text: int | None,
        request_id: str | None,
        priority: int,
    ) -> PreparedRequest:
        assert params.task is not None
        return self._processor.prepare_pooling(
            prompt,
            Pooling(params.task, second_text),
            sampling_params=SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_reading_prefix_cache=self._computes_all(params),
            ),
            keep=params.truncate_prompt_tokens,
            request_id=request_id,
            priority=priority,
        )

    def _computes_all(self, params: PoolingParams) -> bool:
        """Whether the hidden states of all of a prompt's tokens are needed: the prefix cache has none of them."""
        is_mean = self.config.pooling_type != "LAST"
        is_per_token = params.task in ("token_embed", "token_classify")
        return params.skip_reading_prefix_cache or is_mean or is_per_token

    def in_order(self, prepared: Sequence[PreparedRequest]) -> Sequence[PreparedRequest]:
        """As the core had better get them: an encoder computes prompts of like lengths together."""
        if not self.config.is_encoder:
            return prepared
        return sorted(prepared, key=lambda request: -len(request.prompt_token_ids))

    def answer(self, data: np.ndarray, params: PoolingParams) -> np.ndarray:
        """The model's numbers [..., E] or [..., C] as the request wants them."""
        if params.task in ("embed", "token_embed"):
            data = data[..., : params.dimensions]
            return normalized(data) if params.use_activation else data
        if not params.use_activation or self.config.activation == "identity":
            return data
        if self.config.activation == "sigmoid":
            return (0.5 * (1 + np.tanh(0.5 * data))).astype(np.float32)
        exp = np.exp(data - data.max(axis=-1, keepdims=True))
        return exp / exp.sum(axis=-1, keepdims=True)


def normalized(data: np.ndarray) -> np.ndarray:
    """Of length 1; zeros stay zeros."""
    length = np.linalg.norm(data.astype(np.float64), axis=-1, keepdims=True)
    return (data / np.maximum(length, 1e-12)).astype(np.float32)


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """The cosine of two embeddings."""
    return float(normalized(first).astype(np.float64) @ normalized(second).astype(np.float64))


def _text(prompt: Prompt) -> str | None:
    """Of a prompt that has to be tokenized."""
    if isinstance(prompt, dict):
        text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None
