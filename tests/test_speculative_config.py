"""What `speculative_config` says of models that draft, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.speculative_config import speculative_config


@pytest.mark.parametrize(
    ("method", "lookahead"), [("draft_model", 4), ("eagle3", 3), ("medusa", 0), ("ngram", 0)]
)
def test_methods(method: str, lookahead: int) -> None:
    given: dict[str, Any] = dict(method=method, num_speculative_tokens=4)
    if method != "ngram":
        given |= dict(model="a/model", draft_sample_method="probabilistic")
    config = speculative_config(given, "cpu")
    assert config.num_lookahead_tokens == lookahead
    assert config.from_model == (method != "ngram")
    assert config.model == given.get("model")
    assert config.draft_sample_method == given.get("draft_sample_method", "greedy")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(method="eagle3"), "needs a model for method 'eagle3', got None"),
        (dict(method="medusa", model=3), "needs a model for method 'medusa', got 3"),
        (dict(method="ngram", model="m"), "model has no meaning for method 'ngram'"),
        (
            dict(method="ngram", draft_sample_method="greedy"),
            "draft_sample_method has no meaning for method 'ngram'",
        ),
        (
            dict(method="draft_model", model="m", draft_sample_method="typical"),
            r"draft_sample_method must be one of \('greedy', 'probabilistic'\), got 'typical'",
        ),
        (dict(method="eagle", model="m"), "method must be one of .*, got 'eagle'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_config(given | dict(num_speculative_tokens=2), "cpu")
