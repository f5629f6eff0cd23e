"""Jobs of test_mosaic_attention: the Mosaic GPU backend of attention as a whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import mosaic_batches as batches
from mosaic_jobs import interpret_params, races_found


def run_case(case: dict[str, Any], configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`batches.compared`, and {"races"}."""
    from kernels_pallas.ragged_paged_attention.mosaic_gpu import attention
    from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import DecodeConfig, PrefillConfig

    case = batches.Case.of(case)
    arrays, options = batches.make_arrays(case)
    attend = functools.partial(
        attention.ragged_paged_attention,
        scale=case.head_size**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        return_lse=case.return_lse,
        decode_only=case.decode_only,
        decode_config=DecodeConfig(**configs["decode_config"]),
        prefill_config=PrefillConfig(**configs["prefill_config"]),
        interpret=interpret_params(),
    )
    positional = [array for name, array in arrays.items() if name != "query_lens"]
    results = jax.jit(attend)(*positional, **options)
    out, lse = results if case.return_lse else (results, None)
    compared = batches.compared(case, arrays, options, out, lse, zeros=True)
    return {**compared, "races": races_found()}
