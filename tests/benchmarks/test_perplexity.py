"""The perplexity that benchmarks/perplexity.py measures through the engine, against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.perplexity import TEXT, perplexity, token_nlls, windows
from jaxinfer import LLM

WINDOW, STRIDE = 20, 8


@pytest.mark.parametrize("count", [1, 19, 20, 21, 28, 29, 100])
@pytest.mark.parametrize("stride", [1, 8, 20])
def test_each_token_counts_once_with_enough_before_it(count, stride):
    parts = list(windows(count, WINDOW, stride))
    assert [i for part in parts for i in range(part.scored, part.end)] == list(range(count))
    for part in parts:
        assert part.end - part.start <= WINDOW
        assert part.start == 0 or part.scored - part.start >= WINDOW - stride


@pytest.mark.parametrize("stride", [0, WINDOW + 1])
def test_a_stride_that_leaves_tokens_out_is_refused(stride):
    with pytest.raises(ValueError, match=r"stride must be between 1 and window \(20\)"):
        list(windows(50, WINDOW, stride))


def test_it_is_the_one_of_transformers():
    # The suite on the oldest JAX has no torch, and collects this file.
    from tests.tiny_llm import SMALL, ids, oracle_logits, tiny_llm_dir

    tokens = ids("It is not down in any map; true places never are. So he said, and laughed.")
    expected = []
    for part in windows(len(tokens), WINDOW, STRIDE):
        logits = oracle_logits(tokens[part.start : part.end])
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for i in range(max(part.scored, part.start + 1), part.end):
            expected.append(-logprobs[i - part.start - 1, tokens[i]])
    with LLM(str(tiny_llm_dir()), **SMALL) as llm:
        found = token_nlls(llm, tokens, WINDOW, STRIDE)
    assert len(found) == len(tokens) - 1
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert perplexity(found) == pytest.approx(math.exp(np.mean(expected)), rel=2e-4)


def test_the_text_is_whole():
    text = TEXT.read_text("utf-8")
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert len(text) > 80_000 and "Gutenberg" not in text
