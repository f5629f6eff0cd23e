"""Multi-head latent attention the obvious way, in numpy: one request at a time, whole score matrices. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`. Needs concrete arrays, so it can't be called under jit.

    Computes in float32 (float64 if the queries are), whatever the dtype of the inputs.
    """
    num_tokens, num_heads, rank = q_latent_tnl.shape
    dtype = np.dtype(jnp.promote_types(q_latent_tnl.dtype, jnp.float32))
    q_tnc = np.concatenate([q_latent_tnl, q_rope_tnr], axis=2).astype(dtype)
    pages, tables, starts = (np.asarray(x) for x in (latent_pages, block_tables, query_start_loc))
    out_tnl = np.zeros((num_tokens, num_heads, rank), dtype)
    lse_tn = np.full((num_tokens, num_heads), -np.inf, dtype)
    for row, seq_len in enumerate(np.asarray(seq_lens).tolist()):
        first, last = (row, row + 1) if decode_only else (starts[row], starts[row + 1])
        if seq_len == 0 or first == last:
            continue
        cached_jc = pages[tables[row]].reshape(-1, pages.shape[2])[:seq_len].astype(dtype)
        scores_inj = dtype.type(scale) * (q_tnc[first:last] @ cached_jc.T)
        position_i = np.arange(seq_len - (last - first), seq_len)
        seen_ij = np.arange(seq_len)[None, :] <= position_i[:, None]
        scores_inj[~np.broadcast_to(seen_ij[:, None], scores_inj.shape)] = -np.inf
        peak_in = scores_inj.max(axis=-1, keepdims=True)
        weights_inj = np.exp(scores_inj - peak_in)
        total_in = weights_inj.sum(axis=-1, keepdims=True)
        out_tnl[first:last] = weights_inj / total_in @ cached_jc[:, :rank]
        lse_tn[first:last] = (peak_in + np.log(total_in))[..., 0]
    out = jnp.asarray(out_tnl, q_latent_tnl.dtype)
    return (out, jnp.asarray(lse_tn)) if return_lse else out
