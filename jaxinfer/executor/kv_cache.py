"""How many blocks the paged KV cache has, and the arrays that hold them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.config import EngineConfig
from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.models.decoder import KVCache

CacheShapes = tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
"""The arrays of each entry of a `KVCache`."""

CPU_DEFAULT_BYTES = 1 << 30
"""On a CPU the cache shares its memory with everything else that runs there; more is for the user to ask for."""


def device_memory(device: jax.Device) -> tuple[int, int]:
    """Bytes that JAX may use on `device` (on a CPU, what the system has to spare) and how many of them are in use."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]), int(stats.get("bytes_in_use", 0))
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024, 0


def num_blocks(
    config: EngineConfig,
    block_bytes: int,
    state_bytes: int = 0,
    *,
    device_bytes: int,
    resident_bytes: int,
    temp_bytes: int,
) -> int:
    """Blocks of the pool, the padding block 0 included.

    Args:
        block_bytes: One block of a group of layers, on one device.
        state_bytes: States of all requests, which have their place before blocks have.
        device_bytes: What JAX may use on the device; `gpu_memory_utilization` is a fraction of it.
        resident_bytes: Weights and whatever else stays there, on one device.
        temp_bytes: Temporaries of the largest program, read from XLA.

    Never more than all sequences at full length can use. The engine core refuses what is too few for one request.
    """
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    demand, columns = CacheDemand.of(config), config.max_blocks_per_seq
    useful = demand.blocks(config.scheduler.max_num_seqs, columns) + 1
    if cache.kv_cache_memory_bytes is not None:
        return _affordable(cache.kv_cache_memory_bytes - state_bytes, block_bytes, useful)
    budget = int(device_bytes * cache.gpu_memory_utilization) - resident_bytes - temp_bytes
    budget -= state_bytes
    if config.device == "cpu":
        one_request = (demand.blocks(1, columns) + 1) * block_bytes
        budget = min(budget, max(CPU_DEFAULT_BYTES, one_request))
    return _affordable(budget, block_bytes, useful)


def _affordable(budget: int, block_bytes: int, useful: int) -> int:
    """Blocks that a budget pays for; they cost nothing where no layer keeps anything of single tokens."""
    if not block_bytes:
        return useful if budget >= 0 else 0
    return max(min(budget // block_bytes, useful), 0)


def allocate(shapes: CacheShapes) -> KVCache:
    """The zeroed cache, made where it lives: no copy ever passes through the host."""

    def zeros() -> KVCache:
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), tuple(shapes))

    shardings = jax.tree.map(lambda array: array.sharding, tuple(shapes))
    return jax.jit(zeros, out_shardings=shardings)()
