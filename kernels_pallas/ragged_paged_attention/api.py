"""Entry point of ragged paged attention: checks the arguments and picks a backend."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention import reference, xla
from kernels_pallas.ragged_paged_attention.mosaic_gpu_config import unsupported
from kernels_pallas.trace_target import hopper, traced_device_kind

_log = logging.getLogger(__name__)


def _mosaic_gpu(*arrays: jax.Array, **options: object) -> jax.Array:
    # Importing Mosaic takes as long as a quarter of all of JAX, for nothing on a CPU.
    from kernels_pallas.ragged_paged_attention import mosaic_gpu

    return mosaic_gpu.ragged_paged_attention(*arrays, **options)


_BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.ragged_paged_attention,
    "xla": xla.ragged_paged_attention,
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def ragged_paged_attention(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    decode_only: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of T tokens, grouped into R requests, over each request's pages.

    Axes: T tokens, N = K * G query heads (the G heads of a kv head are neighbours), K kv heads,
    H head size, S page size, R requests, P pages per request.

    Args:
        q_tnh: [T, N, H] queries, the tokens of a request adjacent and in order.
        kv_pages: keys and values, each [num_pages, K, S, H] with q's dtype. They already hold the
            keys and values of the tokens in q.
        block_tables: [R, P] int32, the pages of each request in order; entries past the request's
            length are read by nobody but must be valid page numbers.
        seq_lens: [R] int32, context length including the request's tokens in q; 0 for unused rows.
        query_start_loc: [R + 1] int32, request r owns tokens query_start_loc[r] up to
            query_start_loc[r + 1]; unused rows repeat the number of real tokens.
        scale: factor on q . k.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        decode_only: every request owns one token, so T == R and request r is token r.
        implementation: "mosaic_gpu", "xla" or "reference"; None takes the Mosaic GPU kernels where
            they run, on GPUs of compute capability 9.0 and for the shapes that they take, and XLA
            elsewhere. A line in the log says so once.

    Returns:
        [T, N, H] in q's dtype. Tokens that belong to no request get zeros. What unused slots and
        pages hold, NaN included, never reaches the result.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above.
    """
    _check_arrays(q_tnh, kv_pages, block_tables, seq_lens, query_start_loc, decode_only)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap must be a positive finite number or None, got {soft_cap}")
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "decode_only": decode_only,
    }
    arrays = (q_tnh, kv_pages, block_tables, seq_lens, query_start_loc)
    if implementation is not None:
        return _BACKENDS[implementation](*arrays, **options)
    kernel = functools.partial(xla.ragged_paged_attention, **options)
    kind = traced_device_kind("gpu")
    if kind is None:
        return kernel(*arrays)
    if hopper(kind):
        reason = unsupported(q_tnh, kv_pages[0])
    else:
        reason = f"{kind} does not have compute capability 9.0"
    if reason is not None:
        _log_once(f"Attention uses XLA instead of the Mosaic GPU kernels: {reason}.")
        return kernel(*arrays)
    _log_once("Attention uses the Mosaic GPU kernels.")
    # The process may hold CPU devices too: the platform is known for certain when this is lowered.
    return jax.lax.platform_dependent(
        *arrays,
        cuda=functools.partial(_mosaic_gpu, **options),
        default=kernel,
    )


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)


def _check_arrays(
    q_tnh: jax.Array,
    kv_pages: tuple[jax.Array, jax.Array],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    decode_only: bool,
) -> None:
    if q_tnh.ndim != 3:
        raise ValueError(f"q_tnh must have shape [T, N, H], got {q_tnh.shape}")
    if q_tnh.dtype.name not in _DTYPES:
        raise ValueError(f"q_tnh must have a dtype of {_DTYPES}, got {q_tnh.dtype}")
    if len(kv_pages) != 2:
        raise ValueError(f"kv_pages must be a pair (k_pages, v_pages), got {len(kv_pages)} items")
    num_tokens, num_heads, head_size = q_tnh.shape
    for name, pages in zip(("k_pages", "v_pages"), kv_pages, strict=True):
        if pages.ndim != 4 or pages.shape[3] != head_size:
            raise ValueError(
                f"kv_pages: {name} must have shape [num_pages, K, page_size, {head_size}] "
                f"(the head size of q_tnh {q_tnh.shape}), got {pages.shape}"
            )
        if pages.dtype != q_tnh.dtype:
            raise ValueError(
                f"kv_pages: {name} must have q_tnh's dtype {q_tnh.dtype}, got {pages.dtype}"
            )
    k_pages, v_pages = kv_pages
    if k_pages.shape != v_pages.shape:
        raise ValueError(
            f"kv_pages: k_pages {k_pages.shape} and v_pages {v_pages.shape} must agree in shape"
        )
    if num_heads % k_pages.shape[1] != 0:
        raise ValueError(
            f"q_tnh {q_tnh.shape} has {num_heads} query heads, which is not a multiple of the "
            f"{k_pages.shape[1]} kv heads of kv_pages {k_pages.shape}"
        )
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables must have shape [R, P], got {block_tables.shape}")
    num_rows = block_tables.shape[0]
    if seq_lens.shape != (num_rows,):
        raise ValueError(
            f"seq_lens must have shape [{num_rows}] (rows of block_tables), got {seq_lens.shape}"
        )
    if query_start_loc.shape != (num_rows + 1,):
        raise ValueError(
            f"query_start_loc must have shape [{num_rows + 1}] (rows of block_tables, plus one), "
            f"got {query_start_loc.shape}"
        )
    for name, array in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if decode_only and num_tokens != num_rows:
        raise ValueError(
            f"decode_only needs one token per row: q_tnh {q_tnh.shape} has {num_tokens} tokens, "
            f"block_tables {block_tables.shape} has {num_rows} rows"
        )
