"""The body of the prefill kernel: which warp group does what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_consumer import consume
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_producer import (
    produce,
    produce_narrow,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_work import Problem


def prefill_kernel(*arrays: Any, names: tuple[str, ...], problem: Problem) -> None:
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    warp_group = lax.axis_index("warp_group")
    consumers = problem.config.consumers

    producer_registers = 80 if problem.narrow else 40

    @pl.when(warp_group < consumers)
    def _():
        # With two warp groups each thread has 255 registers to begin with.
        if consumers == 2:
            plgpu.set_max_registers(256 - (producer_registers // 16) * 8, action="increase")
        consume(refs, problem, warp_group)

    @pl.when(warp_group == consumers)
    def _():
        if consumers == 2:
            plgpu.set_max_registers(producer_registers, action="decrease")
        (produce_narrow if problem.narrow else produce)(refs, problem)
