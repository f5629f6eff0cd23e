"""The KV cache update one token at a time, in numpy. For tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def kv_cache_update(
    kv_pages: tuple[jax.Array, jax.Array],
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_cache_update`. Needs concrete arrays, so it can't be called under jit."""
    updated = []
    for pages, new in zip(kv_pages, (k_tkh, v_tkh), strict=True):
        result = np.array(pages)
        for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
            page, offset = divmod(slot, pages.shape[2])
            result[page, :, offset] = np.asarray(new[token])
        updated.append(jnp.asarray(result))
    return updated[0], updated[1]
