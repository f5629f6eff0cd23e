"""Job for `compile_job`: what the operations choose on a GPU that none of the Mosaic kernels are for."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import ragged_paged_attention, rope_kv_cache_update
from kernels_pallas.gpu_target import TARGETS, device_mesh


def on_an_a100() -> dict[str, Any]:
    """Lowers each operation twice, and once with a demand for the kernels."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("kernels_pallas")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    target = dataclasses.replace(
        TARGETS["h200"], device_name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0)
    )
    mesh = device_mesh(target)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pages = (array(32, 2, 16, 128),) * 2
    angles = array(8, 64, dtype=jnp.float32)
    calls = (
        (
            rope_kv_cache_update,
            (array(8, 2, 6, 128), pages, array(8, dtype=jnp.int32), angles, angles),
        ),
        (
            functools.partial(ragged_paged_attention, scale=0.1),
            (
                array(8, 8, 128),
                pages,
                array(4, 8, dtype=jnp.int32),
                array(4, dtype=jnp.int32),
                array(5, dtype=jnp.int32),
            ),
        ),
    )
    lowered, refused = "", []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for call, args in calls:
            for _ in range(2):
                lowered += jax.jit(lambda *args, call=call: call(*args)).lower(*args).as_text()
            try:
                jax.jit(functools.partial(call, implementation="mosaic_gpu")).lower(*args)
            except ValueError as error:
                refused.append(str(error))
    return {
        "mosaic_kernels": lowered.count("mosaic_gpu"),
        "log": messages,
        "refused": refused,
    }
