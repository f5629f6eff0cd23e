"""How many blocks of KV cache fit beside what else an engine keeps on its devices."""

from __future__ import annotations

import logging

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.executor import kv_cache
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.speculative.model_drafter import ModelDrafter
from jaxinfer.parallel.mesh import device_bytes

logger = logging.getLogger(__name__)


def num_blocks_for(
    config: EngineConfig,
    programs: Programs,
    leaves: list[jax.Array],
    drafter: ModelDrafter | None,
    memory: tuple[int, int],
) -> int:
    """Number of blocks, given the device's memory (limit, in use) before the leaves were loaded."""
    limit_bytes, in_use = memory
    block_size, state = config.cache.block_size, programs.sampler_state
    shapes = [programs.decoder.kv_cache_shapes(1, block_size)]
    states = programs.decoder.kv_cache_shapes(0, block_size, programs.num_slots)
    state_bytes = sum(map(device_bytes, jax.tree.leaves(states)))
    weights = [*leaves, *jax.tree.leaves(programs.adapters)]
    if drafter is not None:
        shapes.append(drafter.kv_cache_shapes(1))
        weights += drafter.leaves
    block_bytes = sum(map(device_bytes, jax.tree.leaves(shapes)))
    sized_by_memory = (
        config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None
    )
    temp_bytes = 0
    if config.device == "gpu" and sized_by_memory:
        temp_bytes = _largest_temporaries(programs)
    num_blocks = kv_cache.num_blocks(
        config,
        block_bytes,
        state_bytes,
        device_bytes=limit_bytes,
        resident_bytes=in_use
        + sum(map(device_bytes, weights))
        + state.nbytes
        + programs.draft_probs_nbytes,
        temp_bytes=temp_bytes,
    )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB per device",
        num_blocks,
        block_size,
        num_blocks * block_bytes / 2**30,
    )
    if state_bytes:
        logger.info(
            "States of up to %d requests: %.2f GiB per device",
            programs.num_rows,
            state_bytes / 2**30,
        )
    return num_blocks


def _largest_temporaries(programs: Programs) -> int:
    """Temporary bytes of the largest step, as XLA laid them out; they don't depend on the number of blocks."""
    largest = next(programs.ladder.all_shapes())
    compiled = programs.lower_forward(largest).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)
