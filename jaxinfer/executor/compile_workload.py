"""What a GPU that is not here is asked to run: models by name, and the step that is compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.engine.plan import MAX_PREFIX_GROUPS
from jaxinfer.executor.buckets import BucketLadder, StepShape
from jaxinfer.executor.compile_presets import PRESETS
from jaxinfer.executor.deterministic_programs import TILE_TOKENS

PROGRAMS = (
    "decode", "shared_prefix", "mixed", "verify", "deterministic",
    "sample_greedy", "sample_random", "sample_drafts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """The step that is compiled: `rows` requests of `context` tokens each.

    The decode step has one token of each, and so has the one for a shared prefix, of half the context; the mixed step
    has `mixed_tokens` in all, the last request prefilling a chunk. The step to verify has `drafts` of each besides. A
    deterministic engine's step has one shape.
    """

    rows: int = 64
    context: int = 2048
    mixed_tokens: int = 1024
    page_size: int = 64
    drafts: int = 4

    @property
    def num_positions(self) -> int:
        """Where a step with drafts samples."""
        return self.rows * (self.drafts + 1)

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.rows * self.pages_per_row + 1

    @property
    def shared_tokens(self) -> int:
        return self.pages_per_row // 2 * self.page_size

    @property
    def tile(self) -> BucketLadder:
        return BucketLadder.single(TILE_TOKENS["gpu"], self.pages_per_row)

    def shape(self, program: str) -> StepShape:
        if program == "deterministic":
            return next(self.tile.all_shapes())
        tokens = {"mixed": self.mixed_tokens, "verify": self.num_positions}.get(program, self.rows)
        prefixes = MAX_PREFIX_GROUPS if program == "shared_prefix" else 0
        return StepShape(tokens, self.rows, self.pages_per_row, tokens == self.rows, prefixes)


def model_config(model: str) -> dict[str, Any]:
    """A preset's config, or that of a model on this machine or the hub."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        return json.loads(path.read_text())
    from jaxinfer.weights.resolve import open_checkpoint, resolve_model

    return open_checkpoint(resolve_model(model, load_format="dummy")).config()
