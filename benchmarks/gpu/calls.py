"""How the benchmark calls the kernels: on a GPU through the public functions, on a CPU through Pallas's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import traceback
from collections.abc import Callable
from typing import Any

import jax

import kernels_pallas
from kernels_pallas import ragged_paged_attention


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def import_kernels() -> None:
    """Before threads compile: modules that import each other must not be imported by several at once."""
    if not on_gpu():
        return
    for module in pkgutil.walk_packages(kernels_pallas.__path__, "kernels_pallas."):
        if ".mosaic_gpu" in module.name:
            try:
                importlib.import_module(module.name)
            except Exception:
                # The cases that need it will say so.
                traceback.print_exc()


def attention(implementation: str | None = None, **options: Any) -> Callable[..., jax.Array]:
    """`ragged_paged_attention` with its options; None takes the Mosaic kernels on a GPU and XLA on a CPU."""
    if implementation is None:
        implementation = "mosaic_gpu" if on_gpu() else "xla"
    return functools.partial(ragged_paged_attention, implementation=implementation, **options)


def interpreted_attention(head_size: int, group: int, **options: Any) -> Callable[..., Any]:
    """The Mosaic GPU backend in Pallas's interpreter, which takes no `jit`. Its decode kernel has one thread block: the
    interpreter takes its time for each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from kernels_pallas.ragged_paged_attention.mosaic_gpu import attention
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import decode_config
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape

    columns = DecodeShape.of(group, head_size, max_tokens=8).columns
    config = decode_config(head_size, columns, page_itemsize=2)
    options["decode_config"] = dataclasses.replace(config, cores=1)
    options["interpret"] = plgpu.InterpretGPUParams(num_tma_threads_per_device=64)
    return functools.partial(attention.ragged_paged_attention, **options)
