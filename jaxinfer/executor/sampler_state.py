"""Who holds the sampler's device state: allocated when a request first needs it, brought up to date before use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import MAX_LOGIT_BIAS
from jaxinfer.executor.penalties import SamplerArrays
from jaxinfer.executor.sampling_rows import SamplingRows


class SamplerState:
    """Owner of the `SamplerArrays`.

    Before each FULL sampling step call `update(rows)`, pass `arrays` (donated) and put what the program returns back
    into `arrays`. `sharding` is where the state lives (replicated over the mesh).
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, sharding: jax.sharding.Sharding | None = None
    ) -> None:
        self.arrays: SamplerArrays | None = None
        self._shape = (max_num_seqs, vocab_size)
        self._sharding = sharding

    @property
    def nbytes(self) -> int:
        """Bytes on each device once the state is allocated."""
        S, V = self._shape
        return S * (V * 2 + MAX_LOGIT_BIAS * 8)

    def abstract(self) -> SamplerArrays:
        """Shapes of the state, for compilation ahead of time."""
        S, V = self._shape
        array = functools.partial(jax.ShapeDtypeStruct, sharding=self._sharding)
        return SamplerArrays(
            array((S, V), jnp.uint16),
            array((S, MAX_LOGIT_BIAS), jnp.int32),
            array((S, MAX_LOGIT_BIAS), jnp.float32),
        )

    def compile_updates(self) -> None:
        """Compile what `update` runs, so that nothing compiles when a request first needs it."""
        for array in self._zeros():
            _set_row(array, 0, np.zeros(array.shape[1:], array.dtype))

    def update(self, rows: SamplingRows) -> None:
        """Upload what changed with the admissions since the last call."""
        arrays = self._zeros() if self.arrays is None else self.arrays
        for row, states in rows.take_token_states().items():
            arrays = arrays._replace(tokens=_set_row(arrays.tokens, row, states))
        for row, (ids, values) in rows.take_biases().items():
            arrays = arrays._replace(
                bias_ids=_set_row(arrays.bias_ids, row, ids),
                bias_values=_set_row(arrays.bias_values, row, values),
            )
        self.arrays = arrays

    def _zeros(self) -> SamplerArrays:
        S, V = self._shape
        return SamplerArrays(
            self._put(np.zeros((S, V), np.uint16)),
            self._put(np.full((S, MAX_LOGIT_BIAS), V, np.int32)),
            self._put(np.zeros((S, MAX_LOGIT_BIAS), np.float32)),
        )

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(array: jax.Array, row: int, values: jax.Array) -> jax.Array:
    return array.at[row].set(values)
