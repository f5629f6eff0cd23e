"""One model of each kind of state, alone and beside what it shares a layer with, against transformers."""

from __future__ import annotations

import pytest

from tests.models.architectures.oracle import prove
from tests.models.architectures.table import ENTRIES


@pytest.mark.parametrize(
    ("name", "tensor_parallel_size"),
    [
        ("mamba", 2),
        ("falcon_h1", 2),
        ("kimi_linear", 2),
        ("lfm2_moe", 1),
        ("recurrent_gemma", 1),
    ],
)
def test_logits_and_tokens_equal_transformers(name: str, tensor_parallel_size: int) -> None:
    prove(ENTRIES[name], tensor_parallel_size)
