"""What "proven" means: our paged path gives transformers' logits and greedy tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.architectures.entry import (
    NUM_NEW_TOKENS,
    PROMPTS,
    Entry,
    checkpoint,
    transformers_model,
)
from tests.models.paged_harness import PagedRunner, load_checkpoint

TOLERANCE = 1e-4
"""Absolute, of float32 logits."""
TENSOR_PARALLEL_SIZES = (1, 2)

_COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Tiny programs run a few times: compiling them is most of the work."""


def prove(wanted: Entry, tensor_parallel_size: int, page_size: int = 4, **options: Any) -> float:
    """Loads the entry's checkpoint and runs both prompts in one batch: prefill in chunks of up to 8 tokens, then decode.

    Returns the largest difference of a logit. Raises `AssertionError` where the two disagree, and whatever loading a
    checkpoint raises.
    """
    _, model, leaves = load_checkpoint(checkpoint(wanted), tensor_parallel_size, **options)
    runner = PagedRunner(model, leaves, page_size, compiler_options=_COMPILER_OPTIONS)
    worst = 0.0
    for tokens, logits in zip(*runner.greedy(PROMPTS, NUM_NEW_TOKENS), strict=True):
        expected = transformers_logits(wanted, tokens[:-1])
        assert logits.shape == expected.shape
        worst = max(worst, float(np.abs(logits - expected).max()))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
        greedy = expected.argmax(-1)[-NUM_NEW_TOKENS:].tolist()
        assert tokens[-NUM_NEW_TOKENS:] == greedy
    return worst


def transformers_logits(wanted: Entry, token_ids: list[int]) -> np.ndarray:
    """[len(token_ids), V] float32"""
    import torch

    with torch.no_grad():
        return transformers_model(wanted)(torch.tensor([token_ids])).logits[0].numpy()
