"""Jobs of test_attention_backends: what the operations choose on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kernels_pallas import ragged_paged_attention, rope_kv_cache_update, trace_target
from kernels_pallas.gpu_target import TARGETS, compile_for, device_mesh
from kernels_pallas.hlo_report import analyze, inputs_of


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Messages of the library, of which it says each once per process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("kernels_pallas")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield messages
    log.removeHandler(handler)
    trace_target.log_once.cache_clear()


def _attention(
    mesh: Any,
    heads: PartitionSpec,
    num_tokens: int,
    dtype: str = "bfloat16",
    head_size: int = 128,
    page_size: int = 16,
) -> tuple[Any, ...]:
    whole = PartitionSpec()

    def array(spec: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    pages = array(heads, dtype, 512, 8, page_size, head_size)
    return (
        array(heads, dtype, num_tokens, 32, head_size),
        (pages, pages),
        array(whole, jnp.int32, 16, 64),
        array(whole, jnp.int32, 16),
        array(whole, jnp.int32, 17),
    )


def on_an_h200() -> dict[int, dict[str, Any]]:
    """Compiles the public function for one H200 and, cut by kv heads, for four; lowers it for another shape too."""
    results = {}
    attend = functools.partial(ragged_paged_attention, scale=0.1)
    for num_devices in (1, 4):
        mesh = device_mesh("h200", num_devices)
        heads, whole = PartitionSpec(None, "x"), PartitionSpec()
        run = attend
        if num_devices > 1:
            specs = (heads, (heads, heads), whole, whole, whole)
            run = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)
        with _logged() as messages:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                jax.jit(run).lower(*_attention(mesh, heads, num_tokens=128))
            report = compile_for(mesh, run, _attention(mesh, heads, num_tokens=64))
        watched = {f"args[1][{i}]": 1 << 20 for i in range(2)}
        names = [name for name in inputs_of(report.hlo) if "kv_pages" in name or name in watched]
        moved = analyze(report.hlo, watched=dict.fromkeys(names, 1 << 20)).moved
        results[num_devices] = {
            "mosaic_kernels": report.hlo.count('custom_call_target="mosaic_gpu'),
            "log": messages,
            "pages_moved": [copy.label for copy in moved],
            "page_inputs": names,
        }
    return results


def of_other_shapes(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lowers the public function for an H200, twice for each shape."""
    mesh, results = device_mesh("h200"), []
    for shape in shapes:
        lowered = ""
        with _logged() as messages, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            for num_tokens in (64, 128):
                args = _attention(mesh, PartitionSpec(), num_tokens, **shape)
                run = functools.partial(ragged_paged_attention, scale=0.1)
                lowered += jax.jit(run).lower(*args).as_text()
        results.append({"mosaic_kernels": lowered.count("mosaic_gpu"), "log": messages})
    return results


def on_an_a100() -> dict[str, Any]:
    """Lowers each operation twice, and once with a demand for the kernels."""
    target = dataclasses.replace(
        TARGETS["h200"], device_name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0)
    )
    mesh = device_mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())

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
            _attention(mesh, PartitionSpec(), num_tokens=8),
        ),
    )
    lowered, refused = "", []
    with _logged() as messages, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
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
