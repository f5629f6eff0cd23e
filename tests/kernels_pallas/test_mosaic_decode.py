"""The Mosaic GPU decode kernels without a GPU: in the interpreter against a float64 oracle, with planted faults, and compiled
for the H200.

Faults run in processes of their own with a time limit, as a wrong kernel may hang or abort. `MOSAIC_ATTENTION_LONG=1` adds all
cases and faults, a random run, and every page size and dtype to the compiled set.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.decode_shape import DecodeShape
from tests.gpu_compiler import needs_compiler
from tests.kernels_pallas.mosaic_decode_cases import CASES, CORE_FAULTS, FAULTS, LONG_CASES, sizes

HERE = Path(__file__).parent
LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
TOLERANCE = 1e-2
STUCK = "no progress"


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


def job(function: str, timeout: float = 240, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(
        f"mosaic_decode_jobs:{function}",
        arguments,
        timeout=timeout,
        env=env,
        python_path=(str(HERE),),
    )


def check(result: dict[str, Any]) -> str | None:
    """What is wrong with a run, or None."""
    for name in ("finite", "untouched"):
        if not result[name]:
            return f"not {name}"
    if result["races"]:
        return "race"
    if result["lse_error"] > 1e-3:
        return f"log-sum-exp off by {result['lse_error']:.3g}"
    return None if result["error"] < TOLERANCE else f"error {result['error']:.3g}"


@pytest.fixture(scope="module")
def runs(request):
    """Results to come of the jobs that the selected tests need; two run at a time."""
    pool, futures = ThreadPoolExecutor(2), {}
    chosen = {}
    for item in request.session.items:
        if item.path != Path(__file__) or not hasattr(item, "callspec"):
            continue
        name = item.callspec.id
        if item.originalname == "test_matches_the_oracle":
            chosen[name] = (CASES | LONG_CASES)[name]
        if item.originalname == "test_planted_faults_are_caught":
            (case, config), module, edits = FAULTS[name]
            futures[name] = pool.submit(
                job, "run_with_fault", case=case, config=config, module=module, edits=edits
            )
    if chosen:
        futures["cases"] = pool.submit(job, "run_cases", timeout=600, cases=chosen)
    yield futures
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES | LONG_CASES if LONG else CASES)
def test_matches_the_oracle(name, runs):
    result = runs["cases"].result()[name]
    print(result)
    assert check(result) is None


@pytest.mark.parametrize(
    "name", [name for name in (FAULTS if LONG else CORE_FAULTS) if name not in UNSEEN]
)
def test_planted_faults_are_caught(name, runs):
    try:
        found = check(runs[name].result())
    except JobError as error:
        found = str(error)[-300:]
        # A race or a misused barrier, noticed by the interpreter, or a wait without end. Not a slow
        # machine, nor a fault that could not be planted.
        signs = ("RACE DETECTED", "Barrier", "barrier", "Thread", STUCK)
        assert "took longer" not in str(error), error
        assert any(sign in str(error) for sign in signs), error
    print(found)
    assert found is not None


@needs_compiler
@pytest.mark.parametrize("head_size", configs.head_sizes(), ids=str)
def test_compiles_for_the_h200(head_size, tmp_path):
    everything = {
        "sinks": True,
        "return_lse": True,
        "sliding_window": 1000,
        "soft_cap": 30.0,
        "mixed": True,
    }
    shapes, dtypes = [[8, 1]], [("bfloat16", "bfloat16")]
    if head_size == 128:
        shapes, dtypes = [[8, 8]], [*dtypes, ("bfloat16", "float8_e4m3fn")]
    options, page_sizes = [everything], [16]
    if LONG:
        shapes = [[8, 1], [4, 8], [8, 8], [64, 1]]
        pages = ("float8_e4m3fn", "int8")
        dtypes = [(q, kv) for q in ("bfloat16", "float16") for kv in (q, *pages)]
        options = [{}, everything, {"causal": False, "return_lse": True}]
        page_sizes = [16, 32, 64, 128]
    env = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(tmp_path),
    }
    reports = job(
        "compile_decode",
        timeout=3000,
        env=env,
        head_sizes=[head_size],
        page_sizes=page_sizes,
        dtypes=dtypes,
        shapes=shapes,
        options=options,
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


@pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_match_the_oracle(seed):
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
    config = sizes(rng.choice([1, 2, 5]), rng.choice([1, 4]), rng.choice([3, 4]))
    result = job("run_case", timeout=400, case=case, config=config)
    assert check(result) is None, (case, config, result)
