"""Entry point of the KV cache update: checks the arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.kv_cache_update import reference, xla
from kernels_pallas.quantized_pages import KVScales, check_kv_scales, quantized

KVPages = tuple[jax.Array, jax.Array]

_BACKENDS: dict[str, Callable[..., KVPages]] = {
    "reference": reference.kv_cache_update,
    "xla": xla.kv_cache_update,
}


def kv_cache_update(
    kv_pages: KVPages,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_scales: KVScales | None = None,
    implementation: str | None = None,
) -> KVPages:
    """Writes the keys and values of T tokens into their slots.

    On GPUs too this is XLA's scatter: decoders write with `rope_kv_cache_update`, which has a kernel.

    Axes: T tokens, K kv heads, H head size, S page size.

    Args:
        kv_pages: keys and values, each [num_pages, K, S, H]; updated in place where the caller
            donates them.
        k_tkh, v_tkh: [T, K, H] in the pages' dtype, or floating for 8-bit pages.
        slot_mapping: [T] int32, page * S + offset in the page. Several tokens may name the same
            slot (padding does); any one of them is kept then.
        kv_scales: (k_scale, v_scale), each [K] float32, for float8_e4m3fn, uint8 (the
            same as bits, for CPUs) and int8 pages and only for them: the pages hold new / scale to the nearest, ties to even, saturated at 448 and 127.
            NaN stays NaN in float8_e4m3fn and becomes 0 in int8.
        implementation: "reference" or "xla"; None picks by platform and shape.

    Returns:
        The pair of pages.

    Raises:
        ValueError: an argument's shape or dtype is not one of the above.
    """
    if len(kv_pages) != 2:
        raise ValueError(f"kv_pages must be a pair (k_pages, v_pages), got {len(kv_pages)} items")
    for name, pages, new in (("k", kv_pages[0], k_tkh), ("v", kv_pages[1], v_tkh)):
        if pages.ndim != 4:
            raise ValueError(
                f"kv_pages: {name}_pages must have shape [num_pages, K, page_size, H], "
                f"got {pages.shape}"
            )
        expected = (*slot_mapping.shape, pages.shape[1], pages.shape[3])
        if new.shape != expected:
            raise ValueError(
                f"{name}_tkh must have shape [T, K, H] = {expected} (slot_mapping "
                f"{slot_mapping.shape}, {name}_pages {pages.shape}), got {new.shape}"
            )
        if quantized(pages.dtype):
            if not jnp.issubdtype(new.dtype, jnp.floating):
                raise ValueError(
                    f"{name}_tkh must be floating for {name}_pages of {pages.dtype}, got {new.dtype}"
                )
        elif new.dtype != pages.dtype:
            raise ValueError(
                f"{name}_tkh must have the dtype of {name}_pages, {pages.dtype}, got {new.dtype}"
            )
    check_kv_scales(kv_scales, kv_pages)
    if slot_mapping.ndim != 1 or slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"slot_mapping must be int32 [T], got {slot_mapping.dtype} {slot_mapping.shape}"
        )
    name = "xla" if implementation is None else implementation
    if name not in _BACKENDS:
        raise ValueError(f"implementation must be one of {sorted(_BACKENDS)} or None, got {name!r}")
    return _BACKENDS[name](kv_pages, k_tkh, v_tkh, slot_mapping, kv_scales)
