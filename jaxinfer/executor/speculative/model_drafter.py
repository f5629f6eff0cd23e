"""What drafters that are models have in common: weights, their part of the KV cache, programs by shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jaxinfer.executor.buckets import BucketLadder, StepShape
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.kv_cache import CacheShapes
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.sampling_rows import NUM_COLUMNS as NUM_SAMPLING_COLUMNS
from jaxinfer.executor.speculative.draft_choice import DraftChoice
from jaxinfer.executor.speculative.draft_rows import NUM_COLUMNS, DraftRowPacker
from jaxinfer.executor.speculative.drafter import DraftStep, Proposal
from jaxinfer.models.decoder import KVCache
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import replicated
from jaxinfer.weights.plan import LeafPath

Job = tuple[tuple, Callable[[], jax.stages.Compiled]]


class DraftModule(Protocol):
    """A drafter without its weights."""

    @property
    def leaves(self) -> Mapping[LeafPath, jax.ShapeDtypeStruct]: ...

    def kv_cache_shapes(self, num_pages: int, page_size: int) -> CacheShapes: ...


@dataclass(frozen=True)
class DrafterSetting:
    """The engine around a drafter. `num_rows`: S; `num_drafts`: K."""

    mesh: jax.sharding.Mesh
    ladder: BucketLadder
    cache: ProgramCache
    num_rows: int
    block_size: int
    num_drafts: int
    choice: DraftChoice
    target_embed: jax.ShapeDtypeStruct | StoredWeight


MakeDrafter = Callable[[FunctionalDecoder, DrafterSetting], "ModelDrafter"]
"""The drafter for a target, its weights yet to be loaded."""


class ModelDrafter[M: DraftModule](ABC):
    """Drafts after each step. It is handed steps in which no drafts are wanted too: its own cache has to see every token.

    Its layers' pages have the numbers of the target's: whoever holds a block holds both models' part of it. A row that
    samples has blocks for `SpeculativeConfig.num_lookahead_tokens` positions more than the step computes, unless the
    pool had none to spare. `leaves`, `num_blocks` and `kv_cache` are for the executor to fill in before the first step.
    """

    aux_layers: tuple[int, ...] = ()
    """The target's layers whose input it wants to see."""

    def __init__(
        self,
        setting: DrafterSetting,
        module: M,
        load: Callable[[], list[jax.Array]],
        max_positions: int = np.iinfo(np.int32).max,
    ) -> None:
        """`load` makes the leaves, in the order of `module.leaves`. `max_positions`: how long a sequence the drafter can
        continue."""
        self.setting, self.module, self.load = setting, module, load
        self.leaves: list[jax.Array] = []
        self.num_blocks = 0
        self.kv_cache: KVCache = ()
        self._packer = DraftRowPacker(setting.num_rows, setting.block_size, max_positions)

    def propose(self, step: DraftStep) -> Proposal | None:
        self._packer.apply(step.plan)
        tables = PackedLayout(step.shape).views(step.packed)["block_tables"]
        lines = self._packer.pack(step.plan, step.shape, step.sampling, tables)
        packed, lines = jax.device_put((step.packed, lines), replicated(self.setting.mesh))
        extended = self._extend(step, packed, lines)
        drafts = step.plan.drafts
        assert drafts is not None
        return self._draft(step, lines, extended) if drafts.wanted else None

    def kv_cache_shapes(self, num_blocks: int) -> CacheShapes:
        return self.module.kv_cache_shapes(num_blocks, self.setting.block_size)

    def jobs(self) -> Iterator[Job]:
        shapes = list(self.setting.ladder.all_shapes())
        for shape in shapes:
            yield self._extend_job(shape)
        for num_rows, num_pages in {(shape.num_rows, shape.num_pages) for shape in shapes}:
            yield self._draft_job(num_rows, num_pages)

    @abstractmethod
    def _extend(self, step: DraftStep, packed: jax.Array, lines: jax.Array) -> object:
        """Bring the cache up to the step's tokens. What it returns is handed to `_draft`."""

    @abstractmethod
    def _draft(self, step: DraftStep, lines: jax.Array, extended: object) -> Proposal: ...

    @abstractmethod
    def lower_extend(self, shape: StepShape) -> jax.stages.Lowered: ...

    @abstractmethod
    def lower_draft(self, num_rows: int, num_pages: int) -> jax.stages.Lowered: ...

    def _extend_program(self, shape: StepShape) -> jax.stages.Compiled:
        return self.setting.cache.get(*self._extend_job(shape))

    def _draft_program(self, shape: StepShape) -> jax.stages.Compiled:
        return self.setting.cache.get(*self._draft_job(shape.num_rows, shape.num_pages))

    def _extend_job(self, shape: StepShape) -> Job:
        return ("draft_extend", shape), lambda: self.lower_extend(shape).compile()

    def _draft_job(self, num_rows: int, num_pages: int) -> Job:
        key = ("draft", num_rows, num_pages)
        return key, lambda: self.lower_draft(num_rows, num_pages).compile()

    def _abstract_cache(self) -> CacheShapes:
        return self.kv_cache_shapes(self.num_blocks)

    def _abstract_packed(self, shape: StepShape) -> jax.ShapeDtypeStruct:
        return self._array((PackedLayout(shape).size,), np.int32)

    def _abstract_rows(
        self, num_rows: int, num_pages: int
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """What `DraftRows` is made of."""
        by_row = self._array((self.setting.num_rows + 1,), np.int32)
        return self._array((num_rows, NUM_COLUMNS + num_pages), np.int32), by_row, by_row

    def _abstract_sampling(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return self._array((num_rows, NUM_SAMPLING_COLUMNS), np.int32)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype | type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.setting.mesh))
