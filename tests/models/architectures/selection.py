"""Which entries one CI run proves: a few that between them cover what a `DecoderSpec` can say, those whose family the
last commit touched, and some more that change from commit to commit."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Collection

from tests.models.architectures.table import ENTRIES, REPOSITORY, family_file

ALWAYS = (
    "apertus",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite_swa",
    "ministral3",
    "mpt",
    "nanochat",
    "olmo2",
    "opt-post-norm",
    "phi",
    "stablelm",
    "xglm",
)
"""Between them they cover what the `DecoderSpec`s of dense decoders say."""
NUM_SAMPLED = 12
MAX_TOUCHED = 8


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout


def seed() -> str:
    """The commit's checksum; empty in a tree without git."""
    return _git("rev-parse", "HEAD").strip()


def changed_files() -> set[str]:
    """By the last commit, and since."""
    return set(_git("diff", "--name-only", "HEAD~1").split())


def select(seed: str, changed: Collection[str]) -> list[tuple[str, int]]:
    """Names of entries and on how many devices; the same ones for the same arguments."""
    rng = random.Random(seed)
    touched = [
        name
        for name, entry in ENTRIES.items()
        if (path := family_file(entry)) is not None and str(path.relative_to(REPOSITORY)) in changed
    ]
    touched = rng.sample(touched, min(MAX_TOUCHED, len(touched)))
    sampled = rng.sample(sorted(ENTRIES), min(NUM_SAMPLED, len(ENTRIES)))
    # Two devices say more than one.
    two = dict.fromkeys((name, 2) for name in [*ALWAYS, *touched, *sampled])
    return [*two, *((name, 1) for name in sampled)]
