"""Custom logits processors as part of the sampling program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.executor.sampling_rows import MAX_COUNT, NUM_COLUMNS, POSITION, PROMPT_BIT
from jaxinfer.logits_processors import Function, LogitsProcessor, Parameters, RowState


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a processor stands in the packed array: whether a row asked, and its parameters (floats, by their bits)."""

    asked: int
    parameters: dict[str, int]


class LogitsProcessors:
    """An engine's processors, in the order in which they are applied.

    Their columns follow the sampler's own in the packed array: the length of the prompt, then each processor's.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor], vocab_size: int) -> None:
        """Raises `ValueError` for a function that can't be traced, or that doesn't return logits."""
        self._functions = {name: p.function for name, p in processors.items()}
        self._columns: dict[str, _Columns] = {}
        self._num_prompt = NUM_COLUMNS
        column = NUM_COLUMNS + 1
        for name, processor in processors.items():
            parameters = {p: column + 1 + i for i, p in enumerate(processor.parameters)}
            self._columns[name] = _Columns(column, parameters)
            column += 1 + len(parameters)
        self.num_columns = column
        self._check(vocab_size)

    def set_row(
        self, line: np.ndarray, num_prompt_tokens: int, asked: Mapping[str, Parameters]
    ) -> None:
        """Write the row's `line` [num_columns] int32 of the packed array."""
        line[self._num_prompt] = num_prompt_tokens
        floats = line.view(np.float32)
        for name, columns in self._columns.items():
            given = asked.get(name)
            line[columns.asked] = given is not None
            for parameter, column in columns.parameters.items():
                floats[column] = 0.0 if given is None else given[parameter]

    def apply(self, logits: jax.Array, packed: jax.Array, token_states: jax.Array) -> jax.Array:
        """`logits` [R, V] as the processors change them, each in the rows of `packed` [R, num_columns] that asked for
        it. `token_states` [R, V]: see `sampling_rows.PROMPT_BIT`. Tokens at -inf stay there."""
        for name, columns in self._columns.items():
            asked = packed[:, columns.asked] != 0
            state = self._row_state(packed, token_states, columns)
            change = partial(_changed, self._functions[name], state, asked)
            logits = lax.cond(jnp.any(asked), change, lambda same: same, logits)
        return logits

    def _row_state(self, packed: jax.Array, token_states: jax.Array, columns: _Columns) -> RowState:
        position = packed[:, POSITION]
        return RowState(
            parameters={
                name: lax.bitcast_convert_type(packed[:, column], jnp.float32)
                for name, column in columns.parameters.items()
            },
            num_output=position - packed[:, self._num_prompt],
            position=position,
            counts=(token_states & MAX_COUNT).astype(jnp.int32),
            in_prompt=(token_states & PROMPT_BIT) != 0,
        )

    def _check(self, vocab_size: int) -> None:
        shape, kinds = (2, vocab_size), jax.ShapeDtypeStruct
        packed = kinds((2, self.num_columns), jnp.int32)
        states, logits = kinds(shape, jnp.uint16), kinds(shape, jnp.float32)
        for name, columns in self._columns.items():
            state = jax.eval_shape(partial(self._row_state, columns=columns), packed, states)
            try:
                out = jax.eval_shape(self._functions[name], logits, state)
            except Exception as error:  # somebody else's code may fail in any way
                raise ValueError(
                    f"logits_processors[{name!r}] can't be traced: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(out, kinds) or out.shape != shape or out.dtype != jnp.float32:
                raise ValueError(
                    f"logits_processors[{name!r}] must return logits {shape} of float32 for such logits, got {out}."
                )


def _changed(function: Function, state: RowState, asked: jax.Array, logits: jax.Array) -> jax.Array:
    # Neither -inf, which masks are made of, nor a NaN, which is to be reported, may be lost.
    return jnp.where(asked[:, None] & (logits > -jnp.inf), function(logits, state), logits)
