"""The programs of a decoder that makes vectors: the forward pass of all decoders, and what comes in the sampler's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.programs import Programs
from jaxinfer.models.layers import linear
from jaxinfer.pooler_config import PoolingType

ClassHead = tuple[jax.Array, ...]
"""Of a model for classes: [C, E], and a bias [C] where it has one. Empty for embeddings."""


class Pooled(NamedTuple):
    vectors: jax.Array
    """[R, E] or [R, C] float32, of each row's tokens so far."""
    sums: jax.Array
    """[S + 1, E] float32: of each row's hidden states so far; entry S is padding's."""


@dataclass(frozen=True)
class PoolingPrograms(Programs):
    pooling_type: PoolingType = "LAST"
    class_head: ClassHead = ()
    """Shapes."""

    def pool(self, shape: StepShape) -> jax.stages.Compiled:
        """(head, hidden [T, E], hidden [R, E], sums, packed) -> `Pooled`; donates the sums."""
        return self.cache.get(("pool", shape), self._compile(self.lower_pool, shape))

    def classify_tokens(self, num_tokens: int) -> jax.stages.Compiled:
        """(head, hidden [T, E]) -> [T, C] float32."""
        key = ("classify_tokens", num_tokens)
        return self.cache.get(key, self._compile(self.lower_classify, num_tokens))

    def lower_pool(self, shape: StepShape) -> jax.stages.Lowered:
        E, dtype = self.decoder.spec.embed_dim, self.decoder.dtype
        step = partial(pool_step, self.pooling_type, shape, len(self.decoder.groups))
        return jax.jit(step, donate_argnums=3).lower(
            self.class_head,
            self._array((shape.num_tokens, E), dtype),
            self._array((shape.num_rows, E), dtype),
            self.sums_shape,
            self._array((self._packed_size(shape),), np.int32),
        )

    def lower_classify(self, num_tokens: int) -> jax.stages.Lowered:
        hidden = self._array((num_tokens, self.decoder.spec.embed_dim), self.decoder.dtype)
        return jax.jit(classes_of).lower(self.class_head, hidden)

    @property
    def sums_shape(self) -> jax.ShapeDtypeStruct:
        """Only means need any."""
        num_rows = self.num_rows + 1 if self.pooling_type == "MEAN" else 1
        return self._array((num_rows, self.decoder.spec.embed_dim), np.float32)

    def _all_jobs(self) -> Iterator[tuple[tuple, Callable]]:
        for shape in self.ladder.all_shapes():
            yield ("forward", shape), self._compile(self.lower_forward, shape)
            yield ("pool", shape), self._compile(self.lower_pool, shape)


def pool_step(
    pooling_type: PoolingType,
    shape: StepShape,
    num_groups: int,
    head: ClassHead,
    hidden_te: jax.Array,
    last_re: jax.Array,
    sums: jax.Array,
    packed: jax.Array,
) -> Pooled:
    """The step's tokens may be a later chunk of a prompt: what came before is in `sums`."""
    x_re = last_re.astype(jnp.float32)
    if pooling_type == "MEAN":
        step = PackedLayout(shape, num_groups).views(packed)
        starts, lens = step["query_start_loc"], step["seq_lens"]
        tokens = jnp.arange(shape.num_tokens)
        row_of_token = jnp.searchsorted(starts[1:], tokens, side="right")
        new_re = jax.ops.segment_sum(
            hidden_te.astype(jnp.float32), row_of_token, shape.num_rows, indices_are_sorted=True
        )
        is_first = lens <= starts[1:] - starts[:-1]
        sum_re = new_re + jnp.where(is_first[:, None], 0, sums[step["rows"]])
        sums = sums.at[step["rows"]].set(sum_re)
        x_re = sum_re / jnp.maximum(lens, 1)[:, None]
    return Pooled(classes_of(head, x_re) if head else x_re, sums)


def classes_of(head: Sequence[jax.Array], x_ne: jax.Array) -> jax.Array:
    """[N, E] to logits [N, C] in float32."""
    weight, *bias = head
    logits = linear(x_ne.astype(weight.dtype), weight)
    return logits + bias[0].astype(jnp.float32) if bias else logits
