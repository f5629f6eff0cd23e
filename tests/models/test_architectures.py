"""Every family against transformers, through the paged path: a sample here, all of them by `make test-models`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.models.registry import find_family
from tests.models.architectures import dense, selection
from tests.models.architectures.entry import checkpoint
from tests.models.architectures.features import features, spec_of
from tests.models.architectures.oracle import prove
from tests.models.architectures.table import ENTRIES, REASONS, mapping, unaccounted
from tests.models.paged_harness import load_checkpoint

SEED = selection.seed()
SELECTED = selection.select(SEED, selection.changed_files())


@pytest.mark.parametrize(("name", "tensor_parallel_size"), SELECTED)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tensor_parallel_size: int) -> None:
    print(f"{len(SELECTED)} cases of {len(ENTRIES)} entries, chosen by commit {SEED}")
    prove(ENTRIES[name], tensor_parallel_size)


def test_a_checkpoint_without_the_models_prefix_loads_alike(tmp_path: Path) -> None:
    original = checkpoint(ENTRIES["gpt2"])
    tensors = load_file(original / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare, tmp_path / "model.safetensors")
    shutil.copy(original / "config.json", tmp_path)
    for one, other in zip(load_checkpoint(original)[2], load_checkpoint(tmp_path)[2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_architecture_is_proven_or_has_a_reason() -> None:
    assert unaccounted() == []
    assert set(REASONS) <= set(mapping())


def test_what_has_a_reason_is_refused() -> None:
    proven = {mapping()[entry.model_type] for entry in ENTRIES.values()}
    served = [
        name
        for name, architecture in mapping().items()
        if name in REASONS
        and architecture not in proven
        and find_family({"architectures": [architecture], "model_type": name}) is not None
    ]
    assert served == []


def test_the_sample_changes_from_commit_to_commit() -> None:
    assert selection.select("a", ()) == selection.select("a", ())
    assert selection.select("a", ()) != selection.select("b", ())
    touched = {name for name, _ in selection.select("a", {"jaxinfer/models/families/phi3.py"})}
    assert {"phi3", "phi3-long", *selection.ALWAYS} <= touched


def test_those_always_proven_cover_all_that_dense_decoders_say() -> None:
    by_name = {entry.name: features(spec_of(entry)) for entry in dense.ENTRIES}
    covered = set().union(*(by_name[name] for name in selection.ALWAYS))
    assert set().union(*by_name.values()) - covered == set()
