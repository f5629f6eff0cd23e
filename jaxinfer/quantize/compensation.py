"""Rounding column by column, where the columns that are still to come make up for what was rounded before.

GPTQ's way (arXiv 2210.17323) to minimise the error of the outputs for given grids: how much each later column changes for an
error of an earlier one follows from the second moments of the inputs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.quantize.grids import Int4Groups, int4_codes
from jaxinfer.quantize.search import InputMoments

_LEAST_DAMPING = 0.01


@partial(jax.jit, static_argnames="group_size")
def round_compensated(
    weight_oi: jax.Array,
    moments: InputMoments,
    zeros: jax.Array,
    scales: jax.Array,
    group_size: int,
) -> Int4Groups:
    """`weight_oi` for inputs with such moments, on grids of `zeros` and `scales` [O, I/g].

    The grids are those of the weights as they were: grids for what earlier groups have made of a group turn out worse.
    """
    num_rows, num_columns = weight_oi.shape
    # T tokens say how I inputs are related up to an error of about sqrt(I / T): the fewer, the less is made of it.
    damping = jnp.maximum(_LEAST_DAMPING, num_columns / moments.num_tokens / 4)
    shares_ii = _shares(moments.products, damping)

    def step(left_oi: jax.Array, item: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        start, zero_o, scale_o = item
        own = jax.lax.dynamic_slice(shares_ii, (start, start), (group_size, group_size))

        def round_column(i: jax.Array, carry: tuple) -> tuple:
            left, errors, codes = carry
            column = jax.lax.dynamic_index_in_dim(left, i, 1, keepdims=False)
            code = int4_codes(column, zero_o, scale_o)
            steps = code.astype(jnp.float32) - zero_o.astype(jnp.float32)
            error = column - steps * scale_o.astype(jnp.float32)
            left = left - error[:, None] * own[i]
            return left, errors.at[:, i].set(error), codes.at[:, i].set(code)

        group_og = jax.lax.dynamic_slice(left_oi, (0, start), (num_rows, group_size))
        empty = jnp.zeros_like(group_og), jnp.zeros(group_og.shape, jnp.uint8)
        _, errors, codes = jax.lax.fori_loop(0, group_size, round_column, (group_og, *empty))
        shares = jax.lax.dynamic_slice(shares_ii, (start, 0), (group_size, num_columns))
        made_up = jnp.matmul(errors, shares, precision=jax.lax.Precision.HIGHEST)
        return left_oi - made_up, codes

    starts = jnp.arange(0, num_columns, group_size)
    _, codes = jax.lax.scan(step, weight_oi, (starts, zeros.T, scales.T))
    return Int4Groups(jnp.moveaxis(codes, 0, 1).reshape(weight_oi.shape), zeros, scales)


def _shares(products_ii: jax.Array, damping: jax.Array) -> jax.Array:
    """[I, I]: of the error of row's input, what each later one has to make up for; one on the diagonal, zero below.

    `damping`: added to each input's second moment, as a fraction of it.
    """
    # Inputs of the same size are better conditioned. One that the text never has may be anything.
    size_i = jnp.sqrt(jnp.diag(products_ii))
    size_i = jnp.where(size_i == 0, 1, size_i)
    related = products_ii / size_i[:, None] / size_i
    damped = related + damping * jnp.eye(len(related))
    damped += jnp.diag(jnp.where(jnp.diag(related) == 0, 1.0, 0.0))
    # The Cholesky factor of the inverse, from that of the matrix with its order reversed.
    reversed_factor = jnp.linalg.cholesky(damped[::-1, ::-1])
    inverse = jax.scipy.linalg.solve_triangular(reversed_factor, jnp.eye(len(related)), lower=True)
    factor = inverse[::-1, ::-1]
    return factor / jnp.diag(factor)[:, None] * (size_i[:, None] / size_i)
