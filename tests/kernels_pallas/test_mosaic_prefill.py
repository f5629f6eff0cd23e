"""The Mosaic GPU prefill kernel without a GPU: in the interpreter against a float64 oracle, with planted faults, and compiled
for the H200. What CI leaves to the long run: see mosaic_runs.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import pytest

from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas.mosaic_dumps import dump_to
from tests.kernels_pallas.mosaic_prefill_cases import CASES, CORE_CASES, CORE_FAULTS, FAULTS
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
# JAX 0.11's interpreter doesn't order a read before the barrier that frees what was read.
UNSEEN = (
    {"queries_given_up_before_they_are_taken", "values_freed_before_use"}
    if jax.__version_info__ < (0, 12)
    else set()
)


def run_case(case: dict[str, Any], config: dict[str, Any]) -> Call:
    return "mosaic_prefill_jobs:run_case", {"case": case, "config": config}


def random_batch(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = random.Random(seed)
    rows = [(0, 0)] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 4)):
        query_len = rng.randint(1, 150)
        rows.append((query_len + rng.randint(0, 400), query_len))
    rng.shuffle(rows)
    causal = rng.random() < 0.7
    case = {
        "rows": rows,
        "head_size": rng.choice([64, 80, 96, 128, 256]),
        "kv_heads": rng.choice([1, 2]),
        "group": rng.choice([1, 3, 4, 5, 7, 8, 16]),
        "page_size": rng.choice([16, 32, 64, 128]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "page_dtype": rng.choice([None, "float8_e4m3fn", "int8"]),
        "sliding_window": rng.choice([None, None, 1, 60, 200]) if causal else None,
        "soft_cap": rng.choice([None, 3.0]),
        "causal": causal,
        "sinks": rng.random() < 0.5,
        "return_lse": rng.random() < 0.5,
        "padding_tokens": rng.randint(0, 9),
        "left_out": [0] if rng.random() < 0.2 and len(rows) > 1 else [],
        "seed": seed,
    }
    config = {
        "block_tokens": rng.choice([64, 64, 128]),
        "stages": rng.choice([2, 3]),
        "cores": rng.choice([1, 2, 5, 132]),
        "consumers": rng.choice([1, 2]),
        "queries_in_registers": rng.random() < 0.5,
        "own_result_tile": rng.random() < 0.7,
    }
    if case["head_size"] == 256:
        config |= {"block_tokens": 64, "stages": 2, "consumers": 1}
    return case, config


@pytest.fixture(scope="module")
def runs(request):
    calls = {
        "test_matches_the_oracle": {name: run_case(*batch) for name, batch in CASES.items()},
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
    "name", params(CASES if LONG else CORE_CASES, ["window_and_cap", "float8"])
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


def combinations(head_size: int) -> list[tuple[Any, ...]]:
    """See `mosaic_prefill_jobs.Combination`."""
    everything = {"sinks": True, "return_lse": True, "sliding_window": 1000, "soft_cap": 30.0}
    dtypes = [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
    if not LONG:
        return [(head_size, 16, pair, everything) for pair in dtypes]
    dtypes += [("float16", "float16"), ("bfloat16", "int8"), ("float16", "float8_e4m3fn")]
    plain = [{}, {"causal": False, "return_lse": True}]
    return [
        *itertools.product([head_size], [16, 32, 64, 128], dtypes, [everything]),
        *itertools.product([head_size], [16], dtypes, plain),
    ]


@needs_compiler
@pytest.mark.parametrize("head_size", configs.head_sizes() if LONG else [128], ids=str)
def test_compiles_for_the_h200(head_size, tmp_path):
    reports = job(
        "mosaic_prefill_jobs:compile_prefill",
        3000,
        dump_to(tmp_path),
        combinations=combinations(head_size),
    )
    assert {report["kernel"] for report in reports} == {"paged_prefill"}
    for report in reports:
        print(report)
        assert report["spills"] == 0, report
        assert not report["serialized"], report
        # Of two products that are in flight, the first is waited for.
        assert report["overlapped_waits"] >= 2, report
        assert report["tma"] > 0, report
        assert report["fences"] >= 2, report
        assert report["in_flight"] >= 64 << 10, report
        if report["shared_memory"] is not None:
            assert report["shared_memory"] <= report["budget"], report
