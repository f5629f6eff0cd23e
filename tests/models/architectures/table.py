"""All entries, and what they say of transformers' mapping."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jaxinfer.models.registry import find_family
from tests.models.architectures import dense, moe, state_space
from tests.models.architectures.entry import Entry
from tests.models.architectures.reasons import REASONS

REPOSITORY = Path(__file__).resolve().parents[3]

ENTRIES: dict[str, Entry] = {
    entry.name: entry for entry in [*dense.ENTRIES, *moe.ENTRIES, *state_space.ENTRIES]
}

_SOURCES = (
    "jaxinfer/models/*.py",
    "jaxinfer/weights/*.py",
    "jaxinfer/parallel/mesh.py",
    "kernels_pallas/*.py",
    "kernels_pallas/*/*.py",
    "tests/models/paged_harness.py",
    "tests/models/architectures/entry.py",
    "tests/models/architectures/oracle.py",
)
"""What a proof depends on, beside the family's own file."""


def mapping() -> dict[str, str]:
    """Of transformers: model type to the class of its causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def family_file(wanted: Entry) -> Path | None:
    """The source of the family that serves the entry; None where there is none."""
    architecture = mapping()[wanted.model_type]
    family = find_family({"architectures": [architecture], "model_type": wanted.model_type})
    return None if family is None else Path(family.spec_from_config.__code__.co_filename)


def digest(wanted: Entry) -> str:
    """Of the entry and all sources that its proof depends on."""
    found = hashlib.sha256(wanted.digest().encode())
    files: Iterable[Path] = sorted(p for pattern in _SOURCES for p in REPOSITORY.glob(pattern))
    family = family_file(wanted)
    for path in [*files, *([] if family is None else [family])]:
        found.update(path.read_bytes())
    return found.hexdigest()


def unaccounted() -> list[str]:
    """Model types of the mapping that no entry proves and that have no reason."""
    proven = {entry.model_type for entry in ENTRIES.values()}
    return [name for name in mapping() if name not in proven and name not in REASONS]
