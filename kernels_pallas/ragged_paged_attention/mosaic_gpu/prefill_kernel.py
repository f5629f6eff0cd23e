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

# Of three warp groups, whose threads have 168 registers each to begin with: 504 in all, and who asks for more waits for ever.
_PRODUCER_REGISTERS = 104
_CONSUMER_REGISTERS = 200


def prefill_kernel(*arrays: Any, names: tuple[str, ...], problem: Problem) -> None:
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    warp_group = lax.axis_index("warp_group")
    consumers = problem.config.consumers

    @pl.when(warp_group < consumers)
    def _():
        # With two warp groups each thread has 255 registers to begin with.
        if consumers == 2:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        consume(refs, problem, warp_group)

    @pl.when(warp_group == consumers)
    def _():
        if consumers == 2:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        (produce_narrow if problem.narrow else produce)(refs, problem)
