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
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_cache_update`. Needs concrete arrays, so it can't be called under jit."""
    updated = []
    for index, (pages, new) in enumerate(zip(kv_pages, (k_tkh, v_tkh), strict=True)):
        result = np.array(pages)
        if kv_scales is not None:
            new = quantize(np.asarray(new), np.asarray(kv_scales[index])[:, None], result.dtype)
        for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
            page, offset = divmod(slot, pages.shape[2])
            result[page, :, offset] = np.asarray(new[token])
        updated.append(jnp.asarray(result))
    return updated[0], updated[1]


def quantize(x: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x / scale in float8_e4m3fn, its bits (uint8) or int8: nearest, ties to even, saturating; NaN is 0 in int8."""
    x = x.astype(np.float64) / scale
    if dtype == np.int8:
        return np.nan_to_num(np.clip(np.round(x), -127, 127), nan=0).astype(dtype)
    float8 = np.clip(x, -448, 448).astype(jnp.float8_e4m3fn)
    return float8.view(np.uint8) if dtype == np.uint8 else float8
