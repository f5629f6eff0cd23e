"""Scores of pairs of texts: which requests they take, and what comes of these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.frontend.pooling import PoolingProcessor, similarity
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import RequestOutput
from jaxinfer.pooling_outputs import ScoringOutput, ScoringRequestOutput
from jaxinfer.pooling_params import PoolingParams

type Texts = str | Sequence[str]


class ScorePlan:
    """Pairs of texts, as requests and back: `pairs` are indices into `prepared`, twice the same of a cross-encoder."""

    def __init__(
        self,
        pooling: PoolingProcessor,
        params: PoolingParams,
        prepared: list[PreparedRequest],
        pairs: list[tuple[int, int]],
    ) -> None:
        self._pooling, self._params = pooling, params
        self.prepared, self.pairs = prepared, pairs

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        vectors = [self._pooling.answer(data_of(output), self._params) for output in outputs]
        return [
            float(vectors[a][0]) if a == b else similarity(vectors[a], vectors[b])
            for a, b in self.pairs
        ]

    def answers(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        answers = []
        for (a, b), score in zip(self.pairs, self.scores(outputs), strict=True):
            both = [outputs[i] for i in dict.fromkeys((a, b))]
            answers.append(
                ScoringRequestOutput(
                    both[-1].request_id,
                    ScoringOutput(score),
                    [token for output in both for token in output.prompt_token_ids],
                    sum(output.num_cached_tokens for output in both),
                )
            )
        return answers


def score_plan(
    pooling: PoolingProcessor,
    data_1: Texts,
    data_2: Texts,
    params: PoolingParams | None,
    request_id: str | None = None,
    priority: int = 0,
) -> ScorePlan:
    """Raises `ValueError` for numbers of texts that don't pair, and a model that has no scores."""
    firsts = _texts("data_1", data_1)
    seconds = _texts("data_2", data_2)
    if len(firsts) not in (1, len(seconds)):
        raise ValueError(
            f"data_1 must be one text or as many as data_2 ({len(seconds)}), got {len(firsts)}."
        )
    both = list(zip(firsts * (1 if len(firsts) > 1 else len(seconds)), seconds, strict=True))
    config = pooling.config
    if config.is_cross_encoder:
        complete = pooling.complete(params, "classify")
        prepared = [
            pooling.prepare_pair(
                first, second, complete, request_id and f"{request_id}-{i}", priority
            )
            for i, (first, second) in enumerate(both)
        ]
        return ScorePlan(pooling, complete, prepared, [(i, i) for i in range(len(both))])
    if "embed" not in config.tasks:
        raise ValueError(
            f"Scores need a model for one class or for embeddings; this one has {len(config.labels)} classes."
        )
    complete = pooling.complete(params, "embed")
    prepared = pooling.prepare([*firsts, *seconds], complete, request_id, priority)
    pairs = [(i if len(firsts) > 1 else 0, len(firsts) + i) for i in range(len(seconds))]
    return ScorePlan(pooling, complete, prepared, pairs)


def data_of(output: RequestOutput) -> np.ndarray:
    assert output.pooled is not None, "a request for vectors has ended without any"
    return output.pooled


def _texts(name: str, given: Texts) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a text or a list of texts, got {given!r:.100}.")
    return texts
