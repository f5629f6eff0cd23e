"""What an encoder computes of a batch of texts, compiled, one program per shape and kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.engine.messages import PoolingTask
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.models.encoders.encoder import Encoder, TextBatch
from jaxinfer.models.functional import FlatModule
from jaxinfer.parallel.mesh import replicated
from jaxinfer.pooler_config import PoolingType

_NUM_BEFORE = 2
"""Columns of a packed batch before its tokens."""


@dataclass(frozen=True)
class EncoderPrograms:
    module: FlatModule[Encoder]
    mesh: Mesh
    cache: ProgramCache
    pooling_type: PoolingType

    def run(self, shape: tuple[int, int], task: PoolingTask) -> jax.stages.Compiled:
        """From leaves and a packed batch to float32: [B, E] or [B, C], of tokens [B, L, E] or [B, L, C]."""
        return self.cache.get((shape, task), partial(self._compile, shape, task))

    def warm_up(
        self,
        shapes: Iterator[tuple[int, int]],
        tasks: Sequence[PoolingTask],
        progress: Callable[[int, int], None],
    ) -> None:
        jobs = [
            ((shape, task), partial(self._compile, shape, task))
            for shape in shapes
            for task in tasks
        ]
        self.cache.compile_all(jobs, progress)

    def _compile(self, shape: tuple[int, int], task: PoolingTask) -> jax.stages.Compiled:
        packed = jax.ShapeDtypeStruct(
            (shape[0], shape[1] + _NUM_BEFORE), np.int32, sharding=replicated(self.mesh)
        )
        step = jax.jit(partial(self._step, task))
        return step.lower(list(self.module.leaves.values()), packed).compile()

    def _step(self, task: PoolingTask, leaves: Sequence[jax.Array], packed: jax.Array) -> jax.Array:
        batch = TextBatch(packed[:, _NUM_BEFORE:], packed[:, 0], packed[:, 1])
        encoder = self.module.bind(leaves)
        x_ble = encoder(batch)
        if task in ("embed", "classify"):
            x = pool(x_ble, batch.lengths, self.pooling_type)
            return encoder.classify(x) if task == "classify" else x
        if task == "token_embed":
            return x_ble
        B, L, _ = x_ble.shape
        return encoder.classify(x_ble.reshape(B * L, -1)).reshape(B, L, -1)


def pack_texts(
    shape: tuple[int, int], texts: Sequence[np.ndarray], second_texts: Sequence[int | None]
) -> np.ndarray:
    """One int32 array [B, L + 2] for a batch: each row has its length, where its second text begins, and its tokens."""
    num_rows, length = shape
    packed = np.zeros((num_rows, length + _NUM_BEFORE), np.int32)
    packed[:, 1] = length
    for row, (text, second) in enumerate(zip(texts, second_texts, strict=True)):
        packed[row, 0] = len(text)
        if second is not None:
            packed[row, 1] = second
        packed[row, _NUM_BEFORE : _NUM_BEFORE + len(text)] = text
    return packed


def pool(x_ble: jax.Array, lengths: jax.Array, pooling_type: PoolingType) -> jax.Array:
    """[B, E] of the hidden states [B, L, E] of texts of these `lengths` [B]."""
    B, L, _ = x_ble.shape
    if pooling_type == "CLS":
        return x_ble[:, 0]
    if pooling_type == "LAST":
        return x_ble[jnp.arange(B), jnp.maximum(lengths - 1, 0)]
    present = (jnp.arange(L) < lengths[:, None])[..., None]
    return jnp.sum(jnp.where(present, x_ble, 0), axis=1) / jnp.maximum(lengths, 1)[:, None]
