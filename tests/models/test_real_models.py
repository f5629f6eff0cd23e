"""The packaged models against transformers in float32, through the paged path."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.gguf import GGUFReader
from jaxinfer.weights.loader import load_leaves
from tests.models.paged_harness import PagedRunner

NUM_NEW_TOKENS = 12


@pytest.mark.real
@pytest.mark.parametrize(
    ("model", "tensor_parallel_size"),
    [("smollm2_gguf", 1), ("smollm2_gguf", 2), ("gemma3_gguf", 1)],
)
def test_logits_and_greedy_tokens(
    model: str, tensor_parallel_size: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    reader = GGUFReader(path)
    description = describe_model(reader.config(), max_model_len=64)
    decoder = FunctionalDecoder.create(description.spec, make_mesh(tensor_parallel_size), "float32")
    by_path = load_leaves(reader, description.checkpoint_plan(decoder.dims), decoder.leaves)
    leaves = [by_path[p] for p in decoder.leaves]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, description.vocab_size, n).tolist() for n in (2, 9, 23, 40)]
    runner = PagedRunner(decoder, leaves, page_size=16, budget=32)
    found = runner.greedy(prompts, NUM_NEW_TOKENS)

    oracle = transformers_model(path)
    for tokens, logits in zip(*found, strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens[:-1]])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
        assert tokens[-NUM_NEW_TOKENS:] == expected.argmax(-1)[-NUM_NEW_TOKENS:].tolist()


@cache
def transformers_model(path: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
