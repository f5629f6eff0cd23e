"""Entry point of norm, rotation and cache write: checks the arguments and picks a backend."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.platform_dispatch import PlatformDispatch
from kernels_pallas.quantized_pages import KVScales, check_kv_scales
from kernels_pallas.rope_kv_cache_update import reference, xla
from kernels_pallas.trace_target import log_once, not_hopper

KVPages = tuple[jax.Array, jax.Array]


def _mosaic_gpu(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    *args: Any,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    # Imported where it is used: Pallas takes a CPU-only process a second.
    from kernels_pallas.rope_kv_cache_update import mosaic_gpu, mosaic_gpu_config

    mosaic_gpu_config.config_for(qkv, kv_pages, cos, q_norm)
    if (reason := not_hopper()) is not None:
        raise ValueError(f"The Mosaic GPU backend does not take this call: {reason}.")
    return mosaic_gpu.rope_kv_cache_update(
        qkv, kv_pages, slot_mapping, cos, sin, q_norm, *args, **options
    )


def _on_cuda(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: KVScales | None,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    run, reason = xla.rope_kv_cache_update, not_hopper()
    if reason is None:
        from kernels_pallas.rope_kv_cache_update import mosaic_gpu, mosaic_gpu_config

        try:
            mosaic_gpu_config.config_for(qkv, kv_pages, cos, q_norm)
            run = mosaic_gpu.rope_kv_cache_update
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        log_once(f"rope_kv_cache_update runs as XLA operations: {reason}.")
    return run(qkv, kv_pages, slot_mapping, cos, sin, q_norm, k_norm, kv_scales, **options)


_by_platform = PlatformDispatch("rope_kv_cache_update", xla.rope_kv_cache_update, cuda=_on_cuda)
_BACKENDS = {
    "mosaic_gpu": _mosaic_gpu,
    "reference": reference.rope_kv_cache_update,
    "xla": xla.rope_kv_cache_update,
}


def rope_kv_cache_update(
    qkv: jax.Array,
    kv_pages: KVPages,
    slot_mapping: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    kv_scales: KVScales | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[jax.Array, KVPages]:
    """From the QKV projection to attention: QK-norm, rotary embedding of queries and keys, write to the KV cache.

    Axes: T tokens, K kv heads, G query heads per kv head, H head size, S page size, D rotated elements.

    Args:
        qkv: [T, K, G + 2, H], per kv head its G queries, its key and its value; biases added.
        kv_pages: keys and values, each [num_pages, K, S, H] of one dtype; updated in place where the caller donates
            them.
        slot_mapping: [T] int32, page * S + offset in the page. Several tokens may name the same slot (padding does);
            any one of them is kept then.
        cos, sin: [T, D / 2] float32. Element i of a head is rotated against element i + D / 2; those from D on pass
            unrotated.
        q_norm, k_norm: [H] weights of an RMS norm of each head before the rotation; both or neither.
        kv_scales: (k_scale, v_scale), each [K] float32, for float8_e4m3fn, uint8 (the same as bits, for CPUs) and int8
            pages and only for them: the pages hold new / scale to the nearest, ties to even, saturated at 448 and 127. NaN stays NaN in float8_e4m3fn and
            becomes 0 in int8.
        norm_eps: added to the mean square.
        norm_weight_offset: added to the norms' weights (1 where they are stored as differences from one).
        implementation: "mosaic_gpu", "reference" or "xla"; None picks by the platform that the program is lowered for
            and by shape. Arithmetic is float32, "mosaic_gpu" rounds `qkv` to the pages' dtype before it unless that has 8 bits.

    Returns:
        The queries [T, K * G, H] in the pages' dtype (`qkv`'s where the pages have 8 bits), and the pair of pages.

    Raises:
        ValueError: an argument's shape, dtype or value is not one of the above.
    """
    _check_pages(qkv, kv_pages)
    num_tokens, _, _, head_size = qkv.shape
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"slot_mapping must be int32 [{num_tokens}] (the tokens of qkv {qkv.shape}), "
            f"got {slot_mapping.dtype} {slot_mapping.shape}"
        )
    for name, array in (("cos", cos), ("sin", sin)):
        if array.ndim != 2 or array.shape[0] != num_tokens or array.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32 [{num_tokens}, D / 2] (the tokens of qkv {qkv.shape}), "
                f"got {array.dtype} {array.shape}"
            )
    if cos.shape != sin.shape or not 2 <= 2 * cos.shape[1] <= head_size:
        raise ValueError(
            f"cos and sin must have one shape [{num_tokens}, D / 2] with D from 2 to the head size "
            f"{head_size}, got {cos.shape} and {sin.shape}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or both be None")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_size,):
            raise ValueError(f"{name} must have shape [{head_size}], got {weight.shape}")
    check_kv_scales(kv_scales, kv_pages)
    if not (math.isfinite(norm_eps) and norm_eps >= 0):
        raise ValueError(f"norm_eps must be finite and not negative, got {norm_eps}")
    if implementation is not None and implementation not in _BACKENDS:
        raise ValueError(
            f"implementation must be one of {sorted(_BACKENDS)} or None, got {implementation!r}"
        )
    run = _by_platform if implementation is None else _BACKENDS[implementation]
    return run(
        qkv,
        kv_pages,
        slot_mapping,
        cos,
        sin,
        q_norm,
        k_norm,
        kv_scales,
        norm_eps=norm_eps,
        norm_weight_offset=norm_weight_offset,
    )


def _check_pages(qkv: jax.Array, kv_pages: KVPages) -> None:
    if qkv.ndim != 4 or qkv.shape[2] < 3 or not jnp.issubdtype(qkv.dtype, jnp.floating):
        raise ValueError(
            f"qkv must be floating [T, K, G + 2, H] with G >= 1, got {qkv.dtype} {qkv.shape}"
        )
    if len(kv_pages) != 2:
        raise ValueError(f"kv_pages must be a pair (k_pages, v_pages), got {len(kv_pages)} items")
    _, num_kv_heads, _, head_size = qkv.shape
    for name, pages in zip(("k_pages", "v_pages"), kv_pages, strict=True):
        if pages.ndim != 4 or pages.shape[1] != num_kv_heads or pages.shape[3] != head_size:
            raise ValueError(
                f"kv_pages: {name} must have shape [num_pages, {num_kv_heads}, page_size, "
                f"{head_size}] (kv heads and head size of qkv {qkv.shape}), got {pages.shape}"
            )
    k_pages, v_pages = kv_pages
    if (k_pages.shape, k_pages.dtype) != (v_pages.shape, v_pages.dtype):
        raise ValueError(
            f"kv_pages: k_pages {k_pages.dtype} {k_pages.shape} and v_pages {v_pages.dtype} "
            f"{v_pages.shape} must agree"
        )
