"""How the benchmark calls the kernels: on a GPU through the public functions, on a CPU through Pallas's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import traceback
from collections.abc import Callable
from typing import Any

import jax

import kernels_pallas
from benchmarks.gpu.results import NotAvailable


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def import_kernels() -> None:
    """Before threads compile: modules that import each other must not be imported by several at once."""
    for module in pkgutil.walk_packages(kernels_pallas.__path__, "kernels_pallas."):
        if module.name.endswith(".api") or (on_gpu() and module.name.endswith(".mosaic_gpu")):
            try:
                importlib.import_module(module.name)
            except Exception:
                # The cases that need it will say so.
                traceback.print_exc()


def function(module: str, name: str) -> Callable[..., Any]:
    """A function of `kernels_pallas`. Raises `NotAvailable` where this tree has none."""
    path = f"kernels_pallas.{module}"
    try:
        found = importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise NotAvailable(f"{path} is not in this tree")
    try:
        return getattr(importlib.import_module(path), name)
    except AttributeError as error:
        raise NotAvailable(f"{path} has no {name}") from error


def require(call: Callable[..., Any], *options: str) -> None:
    """Raises `NotAvailable` unless `call` takes all of these keyword arguments."""
    known = inspect.signature(call).parameters
    missing = [name for name in options if name not in known]
    if missing:
        raise NotAvailable(f"{call.__name__} has no argument {', '.join(missing)}")


def attention(implementation: str | None = None, **options: Any) -> Callable[..., jax.Array]:
    """`ragged_paged_attention` with its options; None takes the Mosaic kernels on a GPU and XLA on a CPU."""
    call = function("ragged_paged_attention.api", "ragged_paged_attention")
    require(call, *options)
    if implementation is None:
        implementation = "mosaic_gpu" if on_gpu() else "xla"
    return functools.partial(call, implementation=implementation, **options)


def kernel(operation: str, **options: Any) -> Callable[..., Any]:
    """The Mosaic GPU backend of an operation in Pallas's interpreter, which takes no `jit`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    call = function(f"{operation}.mosaic_gpu", operation)
    require(call, "interpret", *options)
    options["interpret"] = plgpu.InterpretGPUParams(num_tma_threads_per_device=64)
    return functools.partial(call, **options)


def one_core_decode(head_size: int, group: int) -> dict[str, Any]:
    """A config of the decode kernel with few thread blocks: the interpreter takes its time for each."""
    make = function("ragged_paged_attention.mosaic_gpu_config", "decode_config")
    shape = function("ragged_paged_attention.mosaic_gpu_decode_shape", "DecodeShape")
    columns = shape.of(group, head_size, max_tokens=8).columns
    config = make(head_size, columns, page_itemsize=2)
    return {"decode_config": dataclasses.replace(config, cores=1)}
