"""Drafts of each kind of drafter over paged, chunked, partly rejected steps, against dense float64 oracles."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.executor.speculative.model_drafter import ModelDrafter
from tests.drafter_checkpoints import Eagle3Oracle, MedusaOracle, write
from tests.executor.drafting_harness import DIM, VOCAB, Drafting, Row, load, start
from tests.tiny_checkpoints import tiny_checkpoint, tiny_model

NUM_DRAFTS = 3
LENGTH = 40


def make(method: str, path: Path, tensor_parallel_size: int = 1) -> ModelDrafter:
    drafter = load(method, path, NUM_DRAFTS, tensor_parallel_size=tensor_parallel_size)
    start(drafter)
    return drafter


def random_rows(seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(
            token_ids=rng.integers(3, VOCAB, LENGTH),
            num_prompt=num_prompt,
            streams=rng.standard_normal((LENGTH, 3, DIM)).astype(np.float32),
            hidden=rng.standard_normal((LENGTH, DIM)).astype(np.float32),
        )
        for num_prompt in (1, 5, 12, 20)
    ]


EMBED = np.random.default_rng(1).standard_normal((VOCAB, DIM)).astype(np.float32)


def check(drafter: ModelDrafter, expected, lookahead: int, seed: int = 0) -> None:
    drafting = Drafting(drafter, random_rows(), expected, EMBED, lookahead, seed)
    drafting.run()
    assert drafting.num_checked > 100
    assert not lookahead or drafting.num_short > 2


@pytest.mark.parametrize(("tensor_parallel_size", "own_embedding"), [(1, False), (2, True)])
def test_eagle3_drafts(tmp_path: Path, tensor_parallel_size: int, own_embedding: bool) -> None:
    oracle = Eagle3Oracle(VOCAB, DIM, own_embedding=own_embedding)
    path = write(tmp_path / "eagle3", oracle.config, oracle.tensors)
    drafter = make("eagle3", path, tensor_parallel_size)

    def expected(row: Row, known: int) -> list[int]:
        streams = row.streams[: known - 1].reshape(known - 1, -1)
        return oracle.drafts(row.token_ids[:known], streams, EMBED, NUM_DRAFTS)

    check(drafter, expected, lookahead=NUM_DRAFTS - 1)


@pytest.mark.parametrize(("tensor_parallel_size", "converted"), [(1, False), (2, True)])
def test_medusa_drafts(tmp_path: Path, tensor_parallel_size: int, converted: bool) -> None:
    oracle = MedusaOracle(VOCAB, DIM, converted=converted)
    path = write(tmp_path / "medusa", oracle.config, oracle.tensors)
    drafter = make("medusa", path, tensor_parallel_size)

    def expected(row: Row, known: int) -> list[int]:
        return oracle.drafts(row.hidden[known - 2], NUM_DRAFTS)

    check(drafter, expected, lookahead=0)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_draft_model_drafts(tensor_parallel_size: int) -> None:
    drafter = make("draft_model", tiny_checkpoint("qwen3"), tensor_parallel_size)
    check(drafter, partial(_continuation, "qwen3"), lookahead=NUM_DRAFTS)


def _continuation(model: str, row: Row, known: int) -> list[int]:
    import torch

    token_ids = row.token_ids[:known].tolist()
    with torch.no_grad():
        for _ in range(NUM_DRAFTS):
            token_ids.append(
                int(tiny_model(model)(torch.tensor([token_ids])).logits[0, -1].argmax())
            )
    return token_ids[known:]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafting_updates_the_cache_in_place(tmp_path: Path, method: str) -> None:
    path = tiny_checkpoint("qwen3")
    if method == "eagle3":
        oracle = Eagle3Oracle(VOCAB, DIM)
        path = write(tmp_path / "eagle3", oracle.config, oracle.tensors)
    drafter = load(method, path, NUM_DRAFTS)
    drafter.num_blocks = 4096
    pages = jax.tree.leaves(drafter.kv_cache_shapes(drafter.num_blocks))
    layer_bytes = pages[0].size * pages[0].dtype.itemsize
    use = drafter.lower_draft(4, 12).compile().memory_analysis()
    assert use.alias_size_in_bytes == len(pages) * layer_bytes
    assert use.temp_size_in_bytes < layer_bytes
