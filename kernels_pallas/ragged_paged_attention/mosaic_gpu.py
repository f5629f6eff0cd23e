"""Ragged paged attention for Hopper in Pallas Mosaic GPU: requests with one token and the others, one kernel each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.ragged_paged_attention import mosaic_gpu_config
from kernels_pallas.ragged_paged_attention.mosaic_gpu_config import DecodeConfig, PrefillConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu_decode import decode_attention
from kernels_pallas.ragged_paged_attention.mosaic_gpu_prefill import prefill_attention
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
    decode_config: DecodeConfig | None = None,
    prefill_config: PrefillConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `api.ragged_paged_attention`.

    Args:
        decode_config: sizes of the kernel for one token per request; None takes the tuned ones.
        prefill_config: the same of the kernel for many.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
        ValueError: shapes that `mosaic_gpu_config.unsupported` names, or a config that does not fit the GPU.
    """
    reason = mosaic_gpu_config.unsupported(
        q_tnh, kv_pages[0], causal=causal, has_sinks=sinks is not None, return_lse=return_lse
    )
    if reason is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    head_size = q_tnh.shape[2]
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "interpret": interpret,
    }
    decode_config = decode_config or mosaic_gpu_config.decode_config(head_size)
    arrays = (q_tnh, *kv_pages, block_tables, seq_lens, query_start_loc)
    if decode_only:
        out_tnh = decode_attention(
            q_tnh, kv_pages, block_tables, seq_lens, config=decode_config, **options
        )
        return vary_like((out_tnh,), *arrays)[0]
    num_tokens = q_tnh.shape[0]
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    decodes = query_lens == 1
    prefilled_tnh = prefill_attention(
        q_tnh,
        kv_pages,
        block_tables,
        seq_lens,
        query_start_loc,
        jnp.where(decodes, 0, query_lens),
        config=prefill_config or mosaic_gpu_config.prefill_config(head_size),
        **options,
    )
    decoded_rnh = decode_attention(
        q_tnh.at[starts].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(decodes, seq_lens, 0),
        config=decode_config,
        **options,
    )
    owned = jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
    out_tnh = jnp.where(owned[:, None, None], prefilled_tnh, 0)
    decode_token = jnp.where(decodes, starts, num_tokens)
    out_tnh = out_tnh.at[decode_token].set(decoded_rnh, mode="drop")
    # A kernel's result doesn't say over which mesh axes it differs.
    return vary_like((out_tnh,), *arrays)[0]
