"""Multi-head latent attention in plain JAX: the portable backend, tuned for CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels_pallas.mla_attention.xla_decode import decode_attention
from kernels_pallas.mla_attention.xla_prefill import prefill_attention


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
    """See `api.mla_attention`.

    Requests with one token take the decode path and the others the prefill path; both loop over the work that there is,
    so the one that has none costs next to nothing. Both weight whole rows of the cache, rotated keys included, which
    are dropped here: the latents alone would have to be copied out of every row.
    """
    rank = q_latent_tnl.shape[2]
    q_tnc = jnp.concatenate([q_latent_tnl, q_rope_tnr], axis=2)
    if decode_only:
        out_tnc, lse_tn = decode_attention(q_tnc, latent_pages, block_tables, seq_lens, scale=scale)
    else:
        starts = query_start_loc[:-1]
        query_lens = query_start_loc[1:] - starts
        decodes = query_lens == 1
        out_tnc, lse_tn = prefill_attention(
            q_tnc,
            latent_pages,
            block_tables,
            seq_lens,
            query_start_loc,
            jnp.where(decodes, 0, query_lens),
            scale=scale,
        )
        decoded_bnc, decoded_lse_bn = decode_attention(
            q_tnc.at[starts].get(mode="clip"),
            latent_pages,
            block_tables,
            jnp.where(decodes, seq_lens, 0),
            scale=scale,
        )
        num_tokens = q_tnc.shape[0]
        decode_token = jnp.where(decodes, starts, num_tokens)
        out_tnc = out_tnc.at[decode_token].set(decoded_bnc, mode="drop")
        lse_tn = lse_tn.at[decode_token].set(decoded_lse_bn, mode="drop")
        owned = jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
        out_tnc = jnp.where(owned[:, None, None], out_tnc, 0)
        lse_tn = jnp.where(owned[:, None], lse_tn, -jnp.inf)
    out_tnl = out_tnc[..., :rank]
    return (out_tnl, lse_tn) if return_lse else out_tnl
