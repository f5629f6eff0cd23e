"""Adapters in the host's memory, and in their slots on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxinfer.config import LoRAConfig
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.lora import AdapterStacks, LowRankStack
from jaxinfer.models.lora_layout import AdapterLayout, Place
from jaxinfer.parallel.mesh import device_bytes, replicated
from jaxinfer.weights.peft import CONFIG_NAME, LowRank, PeftAdapter, read_adapter
from jaxinfer.weights.plan import LoadPlan
from jaxinfer.weights.reader import CheckpointError, numpy_dtype

_Sides = tuple[np.ndarray, np.ndarray]
"""[r, *in] and [r, *out] of one source of a leaf, of the adapter's own rank."""

_Updates = tuple[dict[str, dict[int, _Sides]], ...]
"""An adapter by layer, leaf and source; what it doesn't change is left out."""


class DeviceAdapters:
    """`stacks` is what the step's programs take."""

    def __init__(
        self, config: LoRAConfig, decoder: FunctionalDecoder, plan: LoadPlan, cache: ProgramCache
    ) -> None:
        """`plan`: of the model's checkpoint. Raises `ValueError` for a model that adapters can't change."""
        self._config, self._cache = config, cache
        self._dtype = numpy_dtype(config.dtype)
        self._mesh = decoder.mesh
        self._layout = AdapterLayout.create(
            decoder, plan, config.max_loras, config.max_lora_rank, self._dtype
        )
        self._plan_modules = {
            name.removesuffix(".weight") for source in plan.values() for name in source.names
        }
        self._held: dict[str, _Updates] = {}
        self.stacks = self._layout.zeros()

    @property
    def shapes(self) -> AdapterStacks:
        return self._layout.shapes

    @property
    def device_bytes(self) -> int:
        return sum(map(device_bytes, jax.tree.leaves(self.shapes)))

    def read(self, path: str) -> str:
        """See `engine.plan.Executor.read_adapter`."""
        directory = Path(path).expanduser()
        adapter = read_adapter(directory, self._config.max_lora_rank)
        if adapter.key not in self._held:
            self._held[adapter.key] = self._laid_out(adapter, directory)
        return adapter.key

    def drop(self, key: str) -> None:
        self._held.pop(key, None)

    def fill(self, slot: int, key: str) -> None:
        """Put the adapter into `slot`, from 1 on."""
        values = tuple(
            {leaf: self._filled_up(stack, own.get(leaf, {})) for leaf, stack in stacks.items()}
            for stacks, own in zip(self.shapes, self._held[key], strict=True)
        )
        self.stacks = self._program()(self.stacks, values, np.int32(slot - 1))

    def warm_up(self) -> None:
        self._program()

    def drop_stacks(self) -> None:
        for array in jax.tree.leaves(self.stacks):
            array.delete()

    def restore_stacks(self) -> None:
        """Empty ones."""
        self.stacks = self._layout.zeros()

    def _program(self) -> jax.stages.Compiled:
        return self._cache.get(("fill_adapter",), self._compile)

    def _compile(self) -> jax.stages.Compiled:
        values = jax.tree.map(_one_slot, self.shapes, is_leaf=lambda x: isinstance(x, LowRankStack))
        slot = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(self._mesh))
        fill = jax.jit(
            _fill,
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda array: array.sharding, self.shapes),
        )
        return fill.lower(self.shapes, values, slot).compile()

    def _laid_out(self, adapter: PeftAdapter, directory: Path) -> _Updates:
        updates: _Updates = tuple({} for _ in self.shapes)
        for module, update in adapter.updates.items():
            for place in self._places(module, directory):
                sides = self._sides(module, update, place, directory)
                updates[place.layer].setdefault(place.leaf, {})[place.source] = sides
        return updates

    def _places(self, module: str, directory: Path) -> list[Place]:
        places = self._layout.places.get(module)
        if places is None:
            why = (
                "which adapters can't change here; supported are the matrices of attention and of dense MLPs"
                if module in self._plan_modules
                else "which the model doesn't have"
            )
            raise CheckpointError(
                f"The adapter in {directory} changes {module}, {why}. target_modules of its {CONFIG_NAME} "
                "name what it changes."
            )
        return places

    def _sides(self, module: str, update: LowRank, place: Place, directory: Path) -> _Sides:
        shape = update.b.shape[0], update.a.shape[1]
        if shape != place.shape:
            raise CheckpointError(
                f"The adapter in {directory} is of another model: {module} is {place.shape} [out, in] here, and "
                f"its lora_B.weight and lora_A.weight have shapes {update.b.shape} and {update.a.shape}."
            )
        sides = (
            place.a(update.a).astype(self._dtype),
            place.b(update.b).astype(self._dtype),
        )
        if not all(np.isfinite(side.astype(np.float32)).all() for side in sides):
            raise CheckpointError(
                f"The adapter in {directory} has numbers in {module} that are not finite in {self._config.dtype}."
            )
        return sides

    def _filled_up(self, stack: LowRankStack, own: dict[int, _Sides]) -> LowRankStack:
        """With zeros, up to the shapes of one slot."""
        shape = _one_slot(stack)
        a = np.zeros(shape.a.shape, self._dtype)
        b = tuple(np.zeros(part.shape, self._dtype) for part in shape.b)
        for source, (a_r, b_r) in own.items():
            a[source, : len(a_r)] = a_r
            b[source][: len(b_r)] = b_r
        return LowRankStack(a, b, stack.axis)


def _one_slot(stack: LowRankStack) -> LowRankStack:
    """Shapes without the axis of the slots."""

    def without(array: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
        spec = [*array.sharding.spec]
        del spec[axis]
        shape = (*array.shape[:axis], *array.shape[axis + 1 :])
        sharding = jax.NamedSharding(array.sharding.mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

    return LowRankStack(without(stack.a, 1), tuple(without(b, 0) for b in stack.b), stack.axis)


def _fill(stacks: AdapterStacks, values: AdapterStacks, slot: jax.Array) -> AdapterStacks:
    def fill(stack: LowRankStack, value: LowRankStack) -> LowRankStack:
        a = jax.lax.dynamic_update_index_in_dim(stack.a, value.a, slot, 1)
        b = tuple(
            jax.lax.dynamic_update_index_in_dim(old, new, slot, 0)
            for old, new in zip(stack.b, value.b, strict=True)
        )
        return LowRankStack(a, b, stack.axis)

    return jax.tree.map(fill, stacks, values, is_leaf=lambda x: isinstance(x, LowRankStack))


MakeAdapters = Callable[[FunctionalDecoder, ProgramCache], DeviceAdapters]
