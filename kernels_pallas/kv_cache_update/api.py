"""Entry point of the KV cache update: checks the arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.kv_cache_update import reference, xla

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
    implementation: str | None = None,
) -> KVPages:
    """Writes the keys and values of T tokens into their slots.

    Axes: T tokens, K kv heads, H head size, S page size.

    Args:
        kv_pages: keys and values, each [num_pages, K, S, H]; updated in place where the caller
            donates them.
        k_tkh, v_tkh: [T, K, H] in the pages' dtype.
        slot_mapping: [T] int32, page * S + offset in the page. Several tokens may name the same
            slot (padding does); any one of them is kept then.
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
        if new.dtype != pages.dtype:
            raise ValueError(
                f"{name}_tkh must have the dtype of {name}_pages, {pages.dtype}, got {new.dtype}"
            )
    if slot_mapping.ndim != 1 or slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"slot_mapping must be int32 [T], got {slot_mapping.dtype} {slot_mapping.shape}"
        )
    name = "xla" if implementation is None else implementation
    if name not in _BACKENDS:
        raise ValueError(f"implementation must be one of {sorted(_BACKENDS)} or None, got {name!r}")
    return _BACKENDS[name](kv_pages, k_tkh, v_tkh, slot_mapping)
