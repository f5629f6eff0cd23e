"""The Mosaic GPU decode kernels without a GPU: in the interpreter against a float64 oracle, with planted faults, and compiled
for the H200. What CI leaves to the long run: see mosaic_runs.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import pytest

from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas.mosaic_decode_cases import CASES, CORE_FAULTS, FAULTS, LONG_CASES, sizes
from tests.kernels_pallas.mosaic_dumps import dump_to
from tests.kernels_pallas.mosaic_runs import (
    LONG,
    Call,
    assert_caught,
    assert_right,
    job,
    long_run,
    outcomes_of,
    params,
    with_fault,
)

PACKAGE = "kernels_pallas.ragged_paged_attention.mosaic_gpu"
SEEDS = range(24)
# JAX 0.11's interpreter doesn't order a read before the barrier that lets its place be overwritten.
UNSEEN = (
    {
        "queries_given_up_before_they_are_read",
        "keys_given_up_before_use",
        "values_given_up_before_use",
        "narrow_keys_given_up_before_use",
    }
    if jax.__version_info__ < (0, 12)
    else set()
)


def run_case(case: dict[str, Any], config: dict[str, Any]) -> Call:
    return "mosaic_decode_jobs:run_case", {"case": case, "config": config}


def random_batch(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = random.Random(seed)
    group, head_size = rng.choice([1, 3, 4, 5, 7, 8, 16]), rng.choice([64, 80, 96, 128, 256])
    most = rng.choice([1, DecodeShape.of(group, head_size, 8).tokens])
    rows = [(0, 0)] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 5)):
        query_len = rng.randint(1, most)
        rows.append((query_len + rng.choice([rng.randint(0, 30), rng.randint(0, 700)]), query_len))
    rng.shuffle(rows)
    causal = rng.random() < 0.7
    case = {
        "rows": rows,
        "group": group,
        "head_size": head_size,
        "kv_heads": rng.choice([1, 2]),
        "page_size": rng.choice([16, 32, 64, 128]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "page_dtype": rng.choice([None, "float8_e4m3fn", "int8"]),
        "sliding_window": rng.choice([None, None, 1, 60, 200]) if causal else None,
        "soft_cap": rng.choice([None, 3.0]),
        "causal": causal,
        "sinks": rng.random() < 0.5,
        "return_lse": rng.random() < 0.5,
        "padding_tokens": rng.randint(0, 9),
        "seed": seed,
    }
    return case, sizes(rng.choice([1, 2, 5]), rng.choice([1, 4]), rng.choice([3, 4]))


@pytest.fixture(scope="module")
def runs(request):
    calls = {
        "test_matches_the_oracle": {
            name: run_case(*batch) for name, batch in (CASES | LONG_CASES).items()
        },
        "test_planted_faults_are_caught": {
            name: with_fault(run_case(*batch), f"{PACKAGE}.{module}", edits)
            for name, (batch, module, edits) in FAULTS.items()
        },
        "test_random_batches_match_the_oracle": {
            str(seed): run_case(*random_batch(seed)) for seed in SEEDS
        },
    }
    return outcomes_of(request, calls)


@pytest.mark.parametrize(
    "name",
    params(CASES | LONG_CASES if LONG else CASES, ["two_loops_with_every_option", "float8"]),
)
def test_matches_the_oracle(name, runs, request):
    assert_right(runs[request.node.name])


@pytest.mark.parametrize(
    "name",
    params(
        [name for name in (FAULTS if LONG else CORE_FAULTS) if name not in UNSEEN],
        ["no_wait_for_values"],
    ),
)
def test_planted_faults_are_caught(name, runs, request):
    assert_caught(runs[request.node.name])


@long_run
@pytest.mark.parametrize("seed", SEEDS)
def test_random_batches_match_the_oracle(seed, runs, request):
    assert_right(runs[request.node.name])


# CI compiles a selection of all kernels: test_compile_table.
@needs_compiler
@long_run
@pytest.mark.parametrize("head_size", configs.head_sizes(), ids=str)
def test_compiles_for_the_h200(head_size, tmp_path):
    everything = {
        "sinks": True,
        "return_lse": True,
        "sliding_window": 1000,
        "soft_cap": 30.0,
        "mixed": True,
    }
    pages = ("float8_e4m3fn", "int8")
    combinations = itertools.product(
        [head_size],
        [16, 32, 64, 128],
        [(q, kv) for q in ("bfloat16", "float16") for kv in (q, *pages)],
        [(8, 1), (4, 8), (8, 8), (64, 1)],
        [{}, everything, {"causal": False, "return_lse": True}],
    )
    reports = job(
        "mosaic_decode_jobs:compile_decode",
        3000,
        dump_to(tmp_path),
        combinations=list(combinations),
    )
    assert {report["kernel"] for report in reports} == {"paged_decode", "paged_decode_merge"}
    for report in reports:
        print(report)
        assert report["spills"] == 0, report
        if report["kernel"] != "paged_decode":
            continue
        # 256 threads a block, of 65536 registers in a core.
        assert report["registers"] * 256 * report["blocks_per_core"] <= 65536, report
        assert report["wgmma"] > 0, report
        assert report["tma"] > 0, report
        # Queries, weights, cleared values and results reach wgmma and TMA through generic stores.
        assert report["fences"] >= 4, report
        assert report["in_flight"] >= 64 << 10, report
        if report["shared_memory"] is not None:
            assert report["shared_memory"] <= report["budget"], report
