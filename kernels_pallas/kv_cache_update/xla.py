"""The KV cache update as an XLA scatter."""

from __future__ import annotations

import jax

from kernels_pallas.quantized_pages import KVScales, quantize


def kv_cache_update(
    kv_pages: tuple[jax.Array, jax.Array],
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    slot_mapping: jax.Array,
    kv_scales: KVScales | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_cache_update`."""
    if kv_scales is not None:
        k_tkh, v_tkh = (
            quantize(new, scale[:, None], pages.dtype)
            for pages, new, scale in zip(kv_pages, (k_tkh, v_tkh), kv_scales, strict=True)
        )
    page_size = kv_pages[0].shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size

    def write(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[page, :, offset].set(new, mode="promise_in_bounds")

    return write(kv_pages[0], k_tkh), write(kv_pages[1], v_tkh)
