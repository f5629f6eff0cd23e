"""Ragged paged attention for Hopper in Pallas Mosaic GPU: requests with few tokens and the others, one kernel each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import DecodeConfig, PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode import decode_attention, decode_walks
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import MAX_TOKENS, DecodeShape
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill import prefill_attention
from kernels_pallas.ragged_paged_attention.xla_pages import vary_like


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
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    decode_only: bool = False,
    batch_invariant: bool = False,
    decode_config: DecodeConfig | None = None,
    prefill_config: PrefillConfig | None = None,
    interpret: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.ragged_paged_attention`.

    Args:
        decode_config: sizes of the kernel for few tokens per request; None takes the tuned ones.
        prefill_config: the same of the kernel for many.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
        ValueError: shapes that `config.unsupported` names, or a config that does not fit the GPU.
    """
    if (reason := configs.unsupported(q_tnh, kv_pages[0])) is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    k_pages, v_pages = kv_pages
    num_tokens, num_heads, head_size = q_tnh.shape
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "causal": causal,
        "sinks": sinks,
        "kv_scales": kv_scales,
        "return_lse": return_lse,
        "interpret": interpret,
    }
    arrays = (q_tnh, kv_pages, block_tables, seq_lens)
    starts = query_start_loc[:-1]
    if batch_invariant:
        # The other kernel cuts contexts into parts as the batch has cores left.
        out_tnh, lse_tn = prefill_attention(
            *arrays,
            query_start_loc,
            query_start_loc[1:] - starts,
            config=prefill_config or configs.prefill_config(head_size, k_pages.dtype.itemsize),
            **options,
        )
        owned = jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
        results = (jnp.where(owned[:, None, None], out_tnh, 0), lse_tn)
    elif decode_only:
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        one = jnp.ones_like(tokens)
        results = decode_attention(
            *arrays, tokens, one, max_tokens=1, config=decode_config, **options
        )
    else:
        query_lens = query_start_loc[1:] - starts
        most = DecodeShape.of(num_heads // k_pages.shape[1], head_size, MAX_TOKENS).tokens
        of_few = (*arrays, starts, jnp.where(query_lens <= most, query_lens, 0))
        few = {"max_tokens": most, "num_owned": query_start_loc[-1:], "config": decode_config}
        if num_tokens <= most:
            results = decode_attention(*of_few, **few, **options)
        else:
            results = prefill_attention(
                *arrays,
                query_start_loc,
                jnp.where(query_lens > most, query_lens, 0),
                decoded=decode_walks(*of_few, **few, **options),
                config=prefill_config or configs.prefill_config(head_size, k_pages.dtype.itemsize),
                **options,
            )
    # A kernel's result doesn't say over which mesh axes it differs.
    given = (*arrays[:1], k_pages, v_pages, block_tables, seq_lens, query_start_loc)
    if not return_lse:
        return vary_like(results[:1], *given)[0]
    return vary_like(results, *given)
