"""Writing the latents of new tokens into their pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mla_cache_update(
    latent_pages: jax.Array,
    latent_tl: jax.Array,
    k_rope_tr: jax.Array,
    slot_mapping: jax.Array,
) -> jax.Array:
    """Writes the latents and rotated keys of T tokens into their slots: one scatter of XLA.

    Axes: T tokens, L latent rank, R size of the rotated part, S page size.

    Args:
        latent_pages: [num_pages, S, L + R]; updated in place where the caller donates them.
        latent_tl: [T, L] in the pages' dtype, after the norm.
        k_rope_tr: [T, R] in the pages' dtype.
        slot_mapping: [T] int32, page * S + offset in the page. Several tokens may name the same
            slot (padding does); any one of them is kept then.

    Returns:
        The pages.

    Raises:
        ValueError: an argument's shape or dtype is not one of the above.
    """
    if latent_pages.ndim != 3:
        raise ValueError(
            f"latent_pages must have shape [num_pages, page_size, L + R], got {latent_pages.shape}"
        )
    if slot_mapping.ndim != 1 or slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"slot_mapping must be int32 [T], got {slot_mapping.dtype} {slot_mapping.shape}"
        )
    num_pages, page_size, width = latent_pages.shape
    (num_tokens,) = slot_mapping.shape
    for name, new in (("latent_tl", latent_tl), ("k_rope_tr", k_rope_tr)):
        if new.ndim != 2 or new.shape[0] != num_tokens:
            raise ValueError(
                f"{name} must have shape [{num_tokens}, size] (slot_mapping "
                f"{slot_mapping.shape}), got {new.shape}"
            )
        if new.dtype != latent_pages.dtype:
            raise ValueError(
                f"{name} must have latent_pages' dtype {latent_pages.dtype}, got {new.dtype}"
            )
    if latent_tl.shape[1] + k_rope_tr.shape[1] != width:
        raise ValueError(
            f"latent_tl {latent_tl.shape} and k_rope_tr {k_rope_tr.shape} must fill the {width} "
            f"columns of latent_pages {latent_pages.shape}"
        )
    # Rows of a matrix are written as a whole, whichever page they are in.
    rows = latent_pages.reshape(num_pages * page_size, width)
    new_tc = jnp.concatenate([latent_tl, k_rope_tr], axis=1)
    rows = rows.at[slot_mapping].set(new_tc, mode="promise_in_bounds")
    return rows.reshape(latent_pages.shape)
