"""8-bit pages of a KV cache: which types there are, how numbers get into them, and the scales that go with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

KVScales = tuple[jax.Array, jax.Array]
"""Of keys and of values, each [K] float32: what a number in the pages is multiplied by."""

LARGEST = {"float8_e4m3fn": 448.0, "uint8": 448.0, "int8": 127.0}
"""Largest magnitude that each type is used for; int8's -128 is left out, so that signs are alike.

uint8 holds the bits of float8_e4m3fn, for CPUs: there XLA converts a float8_e4m3fn cache to float16 as a whole before it
gathers from it in a loop or writes to it, and reinterpreting one copies it.
"""


def quantized(dtype: jnp.dtype) -> bool:
    return jnp.dtype(dtype).name in LARGEST


def widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The numbers in pages as `dtype`; that loses nothing where they have 8 bits."""
    if x.dtype == jnp.uint8:
        x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    return x.astype(dtype)


def quantize(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x / scale in an 8-bit type: to the nearest number there is, ties to even, beyond the largest to the largest.

    NaN stays NaN in float8_e4m3fn and becomes 0 in int8, which has none. `scale` broadcasts to x.
    """
    x = x.astype(jnp.float32) / scale
    largest = LARGEST[jnp.dtype(dtype).name]
    x = jnp.clip(x, -largest, largest)
    if dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    if dtype == jnp.int8:
        x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return x.astype(dtype)


def check_kv_scales(kv_scales: KVScales | None, kv_pages: tuple[jax.Array, jax.Array]) -> None:
    """Raises `ValueError` unless 8-bit pages, and only they, have a scale per kv head for keys and for values."""
    k_pages = kv_pages[0]
    if kv_scales is None:
        if quantized(k_pages.dtype):
            raise ValueError(f"kv_scales must be given for pages of {k_pages.dtype}, got None")
        return
    if not quantized(k_pages.dtype):
        raise ValueError(
            f"kv_scales must be None unless the pages have one of {tuple(LARGEST)}, "
            f"got scales and pages of {k_pages.dtype}"
        )
    if len(kv_scales) != 2:
        raise ValueError(f"kv_scales must be a pair (k_scale, v_scale), got {len(kv_scales)} items")
    num_kv_heads = k_pages.shape[1]
    for name, scale in zip(("k_scale", "v_scale"), kv_scales, strict=True):
        if scale.shape != (num_kv_heads,) or scale.dtype != jnp.float32:
            raise ValueError(
                f"kv_scales: {name} must be float32 [{num_kv_heads}] (kv heads of kv_pages "
                f"{k_pages.shape}), got {scale.dtype} {scale.shape}"
            )
