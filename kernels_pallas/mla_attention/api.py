"""Entry point of multi-head latent attention: checks the arguments and picks a backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from kernels_pallas.mla_attention import reference, xla
from kernels_pallas.mla_attention.mosaic_gpu_config import unsupported
from kernels_pallas.ragged_paged_attention.check import check_rows
from kernels_pallas.trace_target import log_once, not_hopper, traced_device_kind


def _mosaic_gpu(*arrays: jax.Array, **options: Any) -> Any:
    # Importing Mosaic takes as long as a quarter of all of JAX, for nothing on a CPU.
    from kernels_pallas.mla_attention import mosaic_gpu

    return mosaic_gpu.mla_attention(*arrays, **options)


_BACKENDS: dict[str, Callable[..., Any]] = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.mla_attention,
    "xla": xla.mla_attention,
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def mla_attention(
    q_latent_tnl: jax.Array,
    q_rope_tnr: jax.Array,
    latent_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    decode_only: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

    The caller has multiplied the queries by W_UK and multiplies the result by W_UV; what is left is attention in which
    all heads share one key per token, its latent and its rotated part, and the latent is the value too.

    Axes: T tokens, N query heads, L latent rank, R size of the rotated part, S page size, B requests, P pages per
    request.

    Args:
        q_latent_tnl: [T, N, L] queries in the latent's space, the tokens of a request adjacent and in order.
        q_rope_tnr: [T, N, R] their rotated parts.
        latent_pages: [num_pages, S, L + R] per token the latent, after its norm, and the rotated key. They already
            hold the tokens of the queries.
        block_tables: [B, P] int32, the pages of each request in order; entries past the request's
            length are read by nobody but must be valid page numbers.
        seq_lens: [B] int32, context length including the request's tokens here; 0 for unused rows.
        query_start_loc: [B + 1] int32, request b owns tokens query_start_loc[b] up to
            query_start_loc[b + 1]; unused rows repeat the number of real tokens.
        scale: factor on the scores; 1 / sqrt of the head size before absorption, and what the rotary scaling adds.
        decode_only: every request owns one token, so T == B and request b is token b.
        return_lse: return lse_tn too.
        implementation: "mosaic_gpu", "xla" or "reference"; None takes the Mosaic GPU kernel where it runs, on GPUs of
            compute capability 9.0 and for the shapes that it takes, and XLA elsewhere. A line in the log says so once.

    Returns:
        [T, N, L] in the queries' dtype, the weighted sums of latents. Tokens that belong to no request get zeros. What
        unused slots and pages hold, NaN included, never reaches the result. With `return_lse` also lse_tn [T, N]
        float32 (float64 for float64 queries), the natural logarithm of the sum of exp of the scaled scores that a token
        sees; -inf for tokens that belong to no request.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above.
    """
    arrays = (q_latent_tnl, q_rope_tnr, latent_pages, block_tables, seq_lens, query_start_loc)
    _check_data(q_latent_tnl, q_rope_tnr, latent_pages)
    check_rows(
        "q_latent_tnl", q_latent_tnl, block_tables, seq_lens, query_start_loc, decode_only, axis="B"
    )
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    options = {"scale": scale, "decode_only": decode_only, "return_lse": return_lse}
    if implementation is not None:
        return _BACKENDS[implementation](*arrays, **options)
    portable = functools.partial(xla.mla_attention, **options)
    if traced_device_kind("gpu") is None:
        return portable(*arrays)
    reason = not_hopper() or unsupported(q_latent_tnl, q_rope_tnr, latent_pages)
    if reason is not None:
        log_once(f"Latent attention uses XLA instead of the Mosaic GPU kernels: {reason}.")
        return portable(*arrays)
    log_once("Latent attention uses the Mosaic GPU kernels.")
    # The process may hold CPU devices too: the platform is known for certain when this is lowered.
    return jax.lax.platform_dependent(
        *arrays, cuda=functools.partial(_mosaic_gpu, **options), default=portable
    )


def _check_data(q_latent_tnl: jax.Array, q_rope_tnr: jax.Array, latent_pages: jax.Array) -> None:
    if q_latent_tnl.ndim != 3:
        raise ValueError(f"q_latent_tnl must have shape [T, N, L], got {q_latent_tnl.shape}")
    if q_latent_tnl.dtype.name not in _DTYPES:
        raise ValueError(f"q_latent_tnl must have a dtype of {_DTYPES}, got {q_latent_tnl.dtype}")
    num_tokens, num_heads, rank = q_latent_tnl.shape
    if q_rope_tnr.ndim != 3 or q_rope_tnr.shape[:2] != (num_tokens, num_heads):
        raise ValueError(
            f"q_rope_tnr must have shape [{num_tokens}, {num_heads}, R] (tokens and heads of "
            f"q_latent_tnl {q_latent_tnl.shape}), got {q_rope_tnr.shape}"
        )
    width = rank + q_rope_tnr.shape[2]
    if latent_pages.ndim != 3 or latent_pages.shape[2] != width:
        raise ValueError(
            f"latent_pages must have shape [num_pages, page_size, {width}] (L of q_latent_tnl "
            f"{q_latent_tnl.shape} and R of q_rope_tnr {q_rope_tnr.shape}), "
            f"got {latent_pages.shape}"
        )
    for name, array in (("q_rope_tnr", q_rope_tnr), ("latent_pages", latent_pages)):
        if array.dtype != q_latent_tnl.dtype:
            raise ValueError(
                f"{name} must have q_latent_tnl's dtype {q_latent_tnl.dtype}, got {array.dtype}"
            )
