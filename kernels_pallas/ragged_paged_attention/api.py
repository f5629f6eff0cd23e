"""Entry point of ragged paged attention: checks the arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.quantized_pages import KVScales, check_kv_scales
from kernels_pallas.ragged_paged_attention import reference, xla
from kernels_pallas.ragged_paged_attention.check import (
    check_arrays,
    check_batch,
    check_head_values,
    check_options,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import unsupported
from kernels_pallas.trace_target import log_once, not_hopper, traced_device_kind

Result = jax.Array | tuple[jax.Array, jax.Array]


def _mosaic_gpu(*arrays: jax.Array, **options: object) -> Result:
    # Importing Mosaic takes as long as a quarter of all of JAX, for nothing on a CPU.
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import attention

    return attention.ragged_paged_attention(*arrays, **options)


_BACKENDS: dict[str, Callable[..., Result]] = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.ragged_paged_attention,
    "xla": xla.ragged_paged_attention,
}


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
    causal: bool = True,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    kv_scales: KVScales | None = None,
    return_lse: bool = False,
    decode_only: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Result:
    """Attention of T tokens, grouped into R requests, over each request's pages.

    Axes: T tokens, N = K * G query heads (the G heads of a kv head are neighbours), K kv heads,
    H head size, S page size, R requests, P pages per request.

    Args:
        q_tnh: [T, N, H] queries, the tokens of a request adjacent and in order.
        kv_pages: keys and values, each [num_pages, K, S, H] with q's dtype, or with `kv_scales`
            float8_e4m3fn, int8, or uint8 for float8_e4m3fn as bits (on CPUs: there XLA converts
            float8_e4m3fn pages to float16 as a whole). They already hold the keys and values of the tokens in q.
        block_tables: [R, P] int32, the pages of each request in order. Entries past the request's length, and with a
            sliding_window those of pages wholly before the window of its first token in q, must be valid page numbers;
            what these pages hold doesn't matter.
        seq_lens: [R] int32, context length including the request's tokens in q; 0 for unused rows.
        query_start_loc: [R + 1] int32, request r owns tokens query_start_loc[r] up to
            query_start_loc[r + 1]; unused rows repeat the number of real tokens.
        scale: factor on q . k.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        causal: a token sees its request's context up to itself; False shows every token all of it
            (seq_lens[r] tokens, which may be fewer than the request has queries). Then there is no
            sliding_window.
        sinks: [N] float32, a score per query head that joins each softmax without a value; it is
            neither scaled nor capped.
        alibi_slopes: [N] float32, what a query head's score, scaled and capped, loses for each position between query
            and key (ALiBi, arXiv 2108.12409); causal only.
        kv_scales: (k_scale, v_scale), each [K] float32, for 8-bit pages and only for them: the key
            is page_value * k_scale[head].
        return_lse: also return each token's log-sum-exp.
        decode_only: every request owns one token, so T == R and request r is token r.
        batch_invariant: among calls with arrays of the same shapes, the bits of a token's result depend on its own
            query, context and position alone: not on who else is in the batch, nor on how many tokens of its request
            are. Slower for requests with one token.
        implementation: "mosaic_gpu", "xla" or "reference"; None takes the Mosaic GPU kernels where
            they run, on GPUs of compute capability 9.0 and for the shapes that they take, and XLA
            elsewhere. A line in the log says so once.

    Returns:
        [T, N, H] in q's dtype. Tokens that belong to no request get zeros. What unused slots and
        pages hold, NaN included, never reaches the result.
        With return_lse a pair of that and [T, N] in float32 (float64 if q is): the natural log of
        the sum of exp over the scores that a token sees, scaled and capped, and over its sink. It
        is -inf for tokens that see nothing or belong to no request.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above. The numbers in block_tables, seq_lens
            and query_start_loc can be looked at outside of jit only.
    """
    check_arrays(q_tnh, kv_pages, block_tables, seq_lens, query_start_loc, decode_only)
    check_options(scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, causal=causal)
    for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        check_head_values(name, values, q_tnh.shape[1])
    if alibi_slopes is not None and not causal:
        raise ValueError("alibi_slopes must be None with causal=False: distances are not known.")
    check_kv_scales(kv_scales, kv_pages)
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    if batch_invariant and implementation == "reference":
        raise ValueError(
            "implementation \"reference\" can't be batch_invariant: its shapes are the requests'."
        )
    integers = (block_tables, seq_lens, query_start_loc)
    if not any(isinstance(x, jax.core.Tracer) for x in integers):
        check_batch(
            *map(np.asarray, integers),
            num_pages=kv_pages[0].shape[0],
            page_size=kv_pages[0].shape[2],
            num_tokens=q_tnh.shape[0],
            causal=causal,
        )
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "causal": causal,
        "return_lse": return_lse,
        "decode_only": decode_only,
    }
    if batch_invariant:
        options["batch_invariant"] = True

    def run(backend: Callable[..., Result]) -> Callable[..., Result]:
        def call(*arrays: jax.Array) -> Result:
            *required, sinks, slopes, kv_scales = arrays
            # The kernels don't take slopes, and are not asked to.
            extra = {} if slopes is None else {"alibi_slopes": slopes}
            return backend(*required, sinks=sinks, kv_scales=kv_scales, **extra, **options)

        return call

    arrays = jax.tree.map(jnp.asarray, (q_tnh, kv_pages, *integers, sinks, alibi_slopes, kv_scales))
    kernel = run(_BACKENDS[implementation or "xla"])
    if implementation in ("xla", "reference"):
        return kernel(*arrays)
    if implementation is None and traced_device_kind("gpu") is None:
        return kernel(*arrays)
    reason = unsupported(q_tnh, kv_pages[0])
    if batch_invariant and sliding_window is not None:
        reason = (
            reason or "batch_invariant with a sliding_window: key blocks begin in a tile's window"
        )
    if alibi_slopes is not None:
        reason = reason or "alibi_slopes are not supported"
    reason = reason or not_hopper()
    if implementation == "mosaic_gpu":
        if reason is not None:
            raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
        return kernel(*arrays)
    if reason is not None:
        log_once(f"Attention uses XLA instead of the Mosaic GPU kernels: {reason}.")
        return kernel(*arrays)
    log_once("Attention uses the Mosaic GPU kernels.")
    # The process may hold CPU devices too: the platform is known for certain when this is lowered.
    return jax.lax.platform_dependent(*arrays, cuda=run(_mosaic_gpu), default=kernel)
