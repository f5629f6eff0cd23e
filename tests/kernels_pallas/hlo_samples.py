"""Programs that the GPU target's tests compile, in a process of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.gpu_target import compile_for, device_mesh
from kernels_pallas.hlo_report import analyze, inputs_of

L, PAGES, K, S, H, E, T = 3, 256, 8, 16, 64, 512, 16
BF16, I32 = jnp.bfloat16, jnp.int32


def _array(shape: tuple[int, ...], dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _write(cache: jax.Array, x: jax.Array, slots: jax.Array) -> jax.Array:
    return cache.at[slots // S, :, slots % S].set(x[:, : K * H].reshape(T, K, H))


def unrolled(caches, weights, x, slots):
    """What the engine does: a list of layers, each with its own cache."""
    caches = list(caches)
    for i, w in enumerate(weights):
        caches[i] = _write(caches[i], x, slots)
        context = caches[i][slots // S].astype(jnp.float32).mean((1, 2, 3))
        x = (x @ w.T + context[:, None]).astype(BF16)
    return x, caches


def scanned(caches, weights, x, slots):
    """What it must not do: caches as scan's inputs and outputs, which copies them."""

    def layer(x, inputs):
        cache, w = inputs
        cache = _write(cache, x, slots)
        return (x @ w.T + cache[0, 0, 0, 0]).astype(BF16), cache

    return lax.scan(layer, x, (caches, weights))


def transposed_weight(caches, weights, x, slots):
    """einsum merges the contracted axes of the weight in another order than they are stored in."""
    heads = x.reshape(T, K, E // K // H, H)
    out = jnp.einsum("tkgh,ekgh->te", heads, weights[0].reshape(E, K, E // K // H, H)[:, ::-1])
    return out, caches


def report(variant: str, target: str = "h200", donate: bool = True) -> dict[str, Any]:
    """Compile one of the variants above; what the tests look at, as JSON can carry it."""
    stacked = variant == "scanned"
    caches = _array((L, PAGES, K, S, H)) if stacked else [_array((PAGES, K, S, H))] * L
    weights = _array((L, E, E)) if stacked else [_array((E, E))] * L
    args = (caches, weights, _array((T, E)), _array((T,), I32))
    compiled = compile_for(
        device_mesh(target), globals()[variant], args, donate_argnums=(0,) if donate else ()
    )
    inputs = inputs_of(compiled.hlo)
    watched = [name for name in inputs if name.startswith(("caches", "weights"))]
    hlo = analyze(compiled.hlo, watched=dict.fromkeys(watched, 1 << 16))
    return {
        "inputs": inputs,
        "alias": compiled.memory.alias,
        "arguments": compiled.memory.arguments,
        "temporaries": compiled.memory.temporaries,
        "seconds": compiled.compile_seconds,
        "aliased_inputs": hlo.aliased_inputs,
        "moved": sorted({moved.label for moved in hlo.moved}),
        "flops": hlo.flops,
        "bytes": hlo.num_bytes,
        "kernels": hlo.num_kernels,
    }


def tensor_parallel(num_devices: int) -> dict[str, Any]:
    """A matmul whose contraction is cut over the devices, so that an all-reduce must follow."""
    mesh = device_mesh("h200", num_devices, "model")
    spec = jax.sharding.PartitionSpec(None, "model")
    cut = jax.sharding.NamedSharding(mesh, spec)
    args = [jax.ShapeDtypeStruct(s, BF16, sharding=cut) for s in ((T, E), (E, E))]
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    compiled = compile_for(mesh, lambda x, w: x @ w.T, args, out_shardings=whole)
    hlo = analyze(compiled.hlo)
    return {
        "arguments": compiled.memory.arguments,
        "flops": hlo.flops,
        "collectives": [k.opcode for k in hlo.kernels if k.is_collective],
        "collective_bytes": hlo.collective_bytes,
    }


def samples(calls: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of functions above, by the caller's names."""
    return {name: globals()[function](**arguments) for name, (function, arguments) in calls.items()}


def fails() -> None:
    raise ValueError("on purpose")


def crashes() -> None:
    import os

    os.abort()


def hangs() -> None:
    import threading

    threading.Event().wait()
