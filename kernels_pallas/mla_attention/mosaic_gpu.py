"""Multi-head latent attention for Hopper in Pallas Mosaic GPU: a plan, the kernel, and a merge of what the plan cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.mla_attention import mosaic_gpu_config
from kernels_pallas.mla_attention.mosaic_gpu_attend import attend
from kernels_pallas.mla_attention.mosaic_gpu_config import ROWS, MlaConfig
from kernels_pallas.mla_attention.mosaic_gpu_merge import merge
from kernels_pallas.mla_attention.mosaic_gpu_plan import plan_runs, plan_tiles
from kernels_pallas.ragged_paged_attention.mosaic_gpu.tiles import not_slices
from kernels_pallas.ragged_paged_attention.xla_pages import vary_like


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
    config: MlaConfig | None = None,
    interpret: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`.

    Args:
        config: sizes of the kernel; None takes the tuned ones.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
        ValueError: shapes that `mosaic_gpu_config.unsupported` names, or a config that does not fit the GPU.
    """
    reason = mosaic_gpu_config.unsupported(q_latent_tnl, q_rope_tnr, latent_pages)
    if reason is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    config = config or mosaic_gpu_config.tuned_config()
    num_tokens, num_heads, rank = q_latent_tnl.shape
    if decode_only:
        query_start_loc = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    heads = mosaic_gpu_config.heads_per_tile(num_heads)
    tiles = plan_tiles(query_start_loc, seq_lens, num_tokens, 1 if decode_only else ROWS // heads)
    plan = plan_runs(tiles, max(config.cores // (num_heads // heads), 1), config)
    num_rows = num_tokens * num_heads
    # A tile always reads 64 rows.
    padding = ((0, ROWS - heads), (0, 0))
    queries = (jnp.pad(q.reshape(num_rows, -1), padding) for q in (q_latent_tnl, q_rope_tnr))
    block_tables = not_slices(block_tables)
    out = jax.new_ref(jnp.zeros((num_rows, rank), q_latent_tnl.dtype))
    lse = jax.new_ref(jnp.full((num_rows,), -jnp.inf, jnp.float32)) if return_lse else None
    options = {"num_heads": num_heads, "heads": heads, "interpret": interpret}
    pieces = attend(
        *queries, latent_pages, block_tables, plan, out, lse, scale=scale, config=config, **options
    )
    merge(*pieces, plan, out, lse, **options)
    arrays = (q_latent_tnl, q_rope_tnr, latent_pages, block_tables, seq_lens, query_start_loc)
    # A kernel's result doesn't say over which mesh axes it differs.
    (out_ml,) = vary_like((jax.freeze(out),), *arrays)
    out_tnl = out_ml.reshape(q_latent_tnl.shape)
    if lse is None:
        return out_tnl
    (lse_m,) = vary_like((jax.freeze(lse),), *arrays)
    return out_tnl, lse_m.reshape(num_tokens, num_heads)
