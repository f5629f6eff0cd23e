"""Attention with shared prefixes by the Mosaic GPU kernels in the interpreter, in a process of its own."""

from __future__ import annotations

import functools

from kernels_pallas.ragged_paged_attention.mosaic_gpu import attention
from kernels_pallas.shared_prefix_attention import cascade
from tests.kernels_pallas.mosaic_jobs import interpret_params, races_found
from tests.kernels_pallas.paged_batches import Geometry, check_result
from tests.kernels_pallas.shared_batches import Group, shared_batch


def check_decodes(num_splits: int) -> dict[str, bool]:
    """Twelve rows share three pages (their tokens fill a tile of the prefill kernel), three share one (few enough for the
    decode kernel), one is alone. Raises `AssertionError` when the result differs from the oracle's."""
    geometry = Geometry(16, 2, 4, 64, sinks=True)
    groups = [Group(3, tuple((1 + 5 * i % 33, 1) for i in range(12))), Group(1, ((16, 1),) * 3)]
    batch, shared = shared_batch(geometry, groups, [(20, 1)], tokens=18, seed=0, num_rows=18)
    arrays, keywords = batch.arrays("bfloat16")
    cascade.ragged_paged_attention = functools.partial(
        attention.ragged_paged_attention, interpret=interpret_params()
    )
    out = cascade.shared_prefix_attention(
        *arrays,
        shared,
        **keywords,
        scale=geometry.options["scale"],
        decode_only=True,
        num_splits=num_splits,
    )
    check_result((out, None), batch, geometry, "bfloat16")
    return {"races": races_found()}
