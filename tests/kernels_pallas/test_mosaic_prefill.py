"""The Mosaic GPU prefill kernel without a GPU: in the interpreter against a float64 oracle, with planted faults, and compiled
for the H200.

Each run is a process of its own with a time limit. `MOSAIC_ATTENTION_LONG=1` adds cases, all faults, a random run, and every head
size, page size and dtype to the compiled set.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_plan import (
    max_prefill_items,
    plan_prefill,
)
from tests.gpu_compiler import needs_compiler

HERE = Path(__file__).parent
LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
TOLERANCE = 1e-2
STUCK = "no progress"

# Two slots: a tile of seven blocks fills each of them at least three times.
IN_TILES = {"block_tokens": 64, "stages": 2, "cores": 2, "queries_in_registers": False}
IN_REGISTERS = {"block_tokens": 64, "stages": 2, "cores": 3}
ONE_CONSUMER = {"block_tokens": 128, "stages": 2, "cores": 132, "consumers": 1}
SHARED_RESULT = {"block_tokens": 64, "stages": 3, "cores": 1, "own_result_tile": False}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunk_onto_context": ({"rows": [(440, 40), (7, 7)], "padding_tokens": 3}, IN_TILES),
    # The window begins in the last page, which is not full, and every page before it is poisoned.
    "window_in_the_last_page": (
        {"rows": [(300, 12)], "kv_heads": 1, "group": 1, "sliding_window": 1},
        IN_TILES,
    ),
    "sinks_and_lse_of_skipped_and_empty_requests": (
        {
            "rows": [(90, 2), (3, 1), (75, 70), (0, 0), (37, 37)],
            "group": 3,
            "kv_heads": 2,
            "head_size": 96,
            "page_size": 32,
            "padding_tokens": 5,
            "left_out": [0, 1],
            "sinks": True,
            "return_lse": True,
        },
        IN_REGISTERS,
    ),
    "window_and_cap": (
        {
            # The windows of a tile of (365, 16) begin on both sides of a block border.
            "rows": [(365, 16), (40, 40)],
            "group": 8,
            "sliding_window": 100,
            "soft_cap": 5.0,
            "return_lse": True,
        },
        IN_REGISTERS,
    ),
    "not_causal": (
        {
            "rows": [(200, 20), (64, 3), (0, 5)],
            "group": 5,
            "head_size": 80,
            "causal": False,
            "sinks": True,
            "return_lse": True,
        },
        ONE_CONSUMER,
    ),
    "float8": (
        {
            "rows": [(300, 20), (70, 10), (5, 5)],
            "group": 7,
            "page_dtype": "float8_e4m3fn",
            "return_lse": True,
        },
        IN_TILES,
    ),
    "int8_shared_result_tile": (
        {
            "rows": [(200, 20), (130, 40)],
            "group": 16,
            "page_dtype": "int8",
            "dtype": "float16",
            "soft_cap": 5.0,
            "sinks": True,
            "page_size": 128,
        },
        SHARED_RESULT,
    ),
    "wide_heads": (
        {
            "rows": [(300, 30), (5, 2)],
            "group": 1,
            "head_size": 256,
            "page_size": 64,
            "dtype": "float16",
        },
        {**ONE_CONSUMER, "block_tokens": 64, "queries_in_registers": False},
    ),
}

CORE_CASES = [
    "chunk_onto_context",
    "sinks_and_lse_of_skipped_and_empty_requests",
    "window_and_cap",
    "not_causal",
    "float8",
]
CORE_HEAD_SIZES = (128,)

FAULT_CASE = CASES["chunk_onto_context"]
WINDOW_FAULT_CASE = CASES["window_and_cap"]
NARROW_FAULT_CASE = CASES["float8"]
SHARED_FAULT_CASE = CASES["int8_shared_result_tile"]
# Tiles of one or two blocks: nothing but its own barriers keeps the producer from running into the next tile.
SHORT_FAULT_CASE = CASES["sinks_and_lse_of_skipped_and_empty_requests"]
_ARRIVE_Q = "plgpu.barrier_arrive(refs.q_free)"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "no_wait_for_keys": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.k_full.at[here])", "pass")],
    ),
    "no_wait_for_values": (
        FAULT_CASE, "prefill_consumer",
        [("lambda: plgpu.barrier_wait(refs.v_full.at[before])", "lambda: None")],
    ),
    "no_wait_for_queries": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.q_full)", "pass")],
    ),
    "no_wait_for_free_slots": (
        FAULT_CASE, "prefill_producer",
        [("pl.when(filled + i >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))",
          "pass")],
    ),
    "next_queries_overwrite_the_current_ones": (
        FAULT_CASE, "prefill_producer",
        [("pl.when(turn > 0)(lambda: plgpu.barrier_wait(refs.q_free))", "pass")],
    ),
    "queries_given_up_before_they_are_taken": (
        SHORT_FAULT_CASE, "prefill_consumer",
        [("        queries = take_queries(refs,",
          f"        {_ARRIVE_Q}\n        queries = take_queries(refs,"),
         (f"            {_ARRIVE_Q}\n        acc", "            pass\n        acc")],
    ),
    "result_tile_reused_before_its_store_has_been_read": (
        FAULT_CASE, "prefill_consumer",
        [("    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n    o_tile", "    o_tile")],
    ),
    "shared_result_tile_given_up_too_early": (
        SHARED_FAULT_CASE, "prefill_consumer",
        [("            plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n", "")],
    ),
    "kernel_ends_before_its_stores": (
        FAULT_CASE, "prefill_consumer", [("    plgpu.wait_smem_to_gmem(0)\n", "")],
    ),
    "too_many_arrivals": (
        FAULT_CASE, "prefill",
        [('"k_full": plgpu.Barrier(num_arrivals=arrivals,',
          '"k_full": plgpu.Barrier(num_arrivals=arrivals + 1,')],
    ),
    "too_few_arrivals": (
        FAULT_CASE, "prefill",
        [('"v_full": plgpu.Barrier(num_arrivals=arrivals,',
          '"v_full": plgpu.Barrier(num_arrivals=arrivals // 2,')],
    ),
    "one_consumer_frees_for_both": (
        FAULT_CASE, "prefill",
        [('"v_free": plgpu.Barrier(num_arrivals=consumers,',
          '"v_free": plgpu.Barrier(num_arrivals=1,')],
    ),
    "values_freed_before_use": (
        FAULT_CASE, "prefill_consumer",
        [("        plgpu.barrier_arrive(refs.v_free.at[before])\n", ""),
         ("        plgpu.barrier_wait(refs.k_full.at[here])\n",
          "        plgpu.barrier_wait(refs.k_full.at[here])\n"
          "        plgpu.barrier_arrive(refs.v_free.at[before])\n")],
    ),
    "unused_values_not_cleared": (
        FAULT_CASE, "tiles", [("row < end", "row < end + 128")],
    ),
    "pages_before_the_window_loaded": (
        CASES["window_in_the_last_page"], "tiles",
        [("return min(page_size, block_tokens)", "return block_tokens")],
    ),
    "no_wait_for_cleared_values": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.cleared)", "pass")],
    ),
    "sees_the_next_token": (
        FAULT_CASE, "prefill_consumer", [("seen = columns <= last", "seen = columns <= last + 1")],
    ),
    "edge_one_block_late": (
        FAULT_CASE, "prefill_consumer",
        [("whole_until = own_position + 1 ", "whole_until = own_position + block ")],
    ),
    "page_off_by_one": (
        FAULT_CASE, "tiles",
        [("jnp.minimum(page, last_page)", "jnp.minimum(page + 1, last_page)")],
    ),
    "window_one_too_long": (
        WINDOW_FAULT_CASE, "prefill_consumer",
        [("seen &= columns > last - window", "seen &= columns >= last - window")],
    ),
    "window_edge_not_masked": (
        WINDOW_FAULT_CASE, "prefill_consumer",
        [("seen_by_all - tile.begin + (block - 1), ", "seen_by_all - tile.begin, ")],
    ),
    "not_faded": (
        FAULT_CASE, "prefill_consumer", [("tiles.faded(acc, fade)", "acc")],
    ),
    "tiles_skipped": (
        FAULT_CASE, "prefill_work",
        [("index = turn * problem.cores +", "index = turn * (problem.cores + 1) +")],
    ),
    "rows_of_the_next_request_written": (
        FAULT_CASE, "prefill_consumer", [("own_tokens == share", "own_tokens > 0")],
    ),
    "sink_of_the_next_head": (
        SHORT_FAULT_CASE, "prefill_consumer",
        [("problem.share.bit_length() - 1", "problem.share.bit_length() - 2")],
    ),
    "narrow_no_wait": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("plgpu.barrier_wait(refs.narrow_full.at[slot])", "pass")],
    ),
    "narrow_refilled_before_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("            cursor = issue(n + stages, cursor)\n", ""),
         ("            plgpu.barrier_wait(refs.narrow_full.at[slot])\n",
          "            plgpu.barrier_wait(refs.narrow_full.at[slot])\n"
          "            cursor = issue(n + stages, cursor)\n")],
    ),
    "widened_over_keys_in_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.k_free.at[0]))", "pass")],
    ),
    "widened_over_values_in_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.v_free.at[0]))", "pass")],
    ),
    "narrow_unused_values_not_cleared": (
        NARROW_FAULT_CASE, "dequant", [("row < end", "row < end + rows")],
    ),
    "value_scale_forgotten": (
        NARROW_FAULT_CASE, "prefill_consumer", [("refs.scales[1, tile.kv_head]", "1.0")],
    ),
}  # fmt: skip
CORE_FAULTS = [
    "no_wait_for_values",
    "no_wait_for_free_slots",
    "next_queries_overwrite_the_current_ones",
    "result_tile_reused_before_its_store_has_been_read",
    "sees_the_next_token",
]
# JAX 0.11's interpreter doesn't order a read before the barrier that frees what was read.
UNSEEN = (
    {"queries_given_up_before_they_are_taken", "values_freed_before_use"}
    if jax.__version_info__ < (0, 12)
    else set()
)


def job(function: str, timeout: float = 240, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(
        f"mosaic_prefill_jobs:{function}",
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
    """Results to come of the jobs that the selected tests need, by test name; two run at a time."""
    pool, futures = ThreadPoolExecutor(2), {}
    for item in request.session.items:
        if item.path != Path(__file__) or not hasattr(item, "callspec"):
            continue
        name = item.callspec.id
        if item.originalname == "test_matches_the_oracle":
            case, config = CASES[name]
            futures[item.name] = pool.submit(job, "run_case", case=case, config=config)
        if item.originalname == "test_planted_faults_are_caught":
            (case, config), module, edits = FAULTS[name]
            futures[item.name] = pool.submit(
                job, "run_with_fault", case=case, config=config, module=module, edits=edits
            )
    yield futures
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES if LONG else CORE_CASES)
def test_matches_the_oracle(name, runs, request):
    result = runs[request.node.name].result()
    print(result)
    assert check(result) is None


@pytest.mark.parametrize(
    "name", [name for name in (FAULTS if LONG else CORE_FAULTS) if name not in UNSEEN]
)
def test_planted_faults_are_caught(name, runs, request):
    try:
        found = check(runs[request.node.name].result())
    except JobError as error:
        found = str(error)[-300:]
        # A race, a misused barrier or an index out of bounds, noticed by the interpreter, or a wait without end.
        # Not a slow machine, nor a fault that could not be planted.
        signs = (
            "RACE DETECTED",
            "Barrier",
            "barrier",
            "Thread",
            "but buffer has shape",
            "before kernel",
            STUCK,
        )
        assert "took longer" not in str(error), error
        assert any(sign in str(error) for sign in signs), error
    print(found)
    assert found is not None


def test_plan_cuts_requests_into_tiles_and_sorts_them_by_cost():
    query_lens, seq_lens = [40, 0, 7, 64], [500, 30, 1000, 64]
    starts = np.concatenate([[0], np.cumsum([40, 2, 7, 64])])
    arrays = [jnp.asarray(x, jnp.int32) for x in (query_lens, starts, seq_lens)]
    max_items = max_prefill_items(113, 4, 32)
    plan = plan_prefill(*arrays, tile=32, max_items=max_items, block=64, alignment=16)
    items = np.asarray(plan.items)[: int(plan.count[0])].tolist()
    # Request, first token, tokens, position: 16, 8, 8 blocks, and a chunk of its own from position 0.
    assert items == [
        [2, 42, 7, 993],
        [0, 0, 32, 460],
        [0, 32, 8, 492],
        [3, 49, 32, 0],
        [3, 81, 32, 32],
    ]
    assert not np.asarray(plan.items)[len(items) :, 2].any()
    assert np.asarray(plan.rank)[:5].tolist() == [1, 2, 0, 3, 4]
    assert np.asarray(plan.begins).tolist() == [0, 2, 2, 3]


def test_plan_leaves_blocks_before_the_window_out_of_the_cost():
    arrays = [jnp.asarray(x, jnp.int32) for x in ([32, 64], [0, 32, 96], [2016, 200])]
    plan = plan_prefill(*arrays, tile=64, max_items=4, block=64, alignment=16, sliding_window=64)
    # What the first sees, from 1921 to 2015, begins at 1920 and takes 2 blocks; the second's, from 73 to 199, 3.
    assert np.asarray(plan.items)[:2, 0].tolist() == [1, 0]


@pytest.mark.parametrize("page_itemsize", [1, 2])
@pytest.mark.parametrize("head_size", configs.head_sizes())
def test_tuned_sizes_fit_with_enough_in_flight(head_size, page_itemsize):
    config = configs.prefill_config(head_size, page_itemsize)
    config.check(head_size, 2, page_itemsize)
    assert config.bytes_in_flight(head_size, page_itemsize) >= 64 << 10


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"PrefillConfig.cores must be at least 1, got 0"):
        configs.PrefillConfig(block_tokens=64, stages=2, cores=0)
    config = configs.PrefillConfig(block_tokens=64, stages=7)
    config.check(128, 2, 1)
    with pytest.raises(ValueError, match=r"PrefillConfig needs .* shared memory at head size 128"):
        config.check(128, 2, 2)


@needs_compiler
@pytest.mark.parametrize("head_size", configs.head_sizes() if LONG else CORE_HEAD_SIZES, ids=str)
def test_compiles_for_the_h200(head_size, tmp_path):
    everything = {"sinks": True, "return_lse": True, "sliding_window": 1000, "soft_cap": 30.0}
    env = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(tmp_path),
    }
    dtypes = [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
    more = [("float16", "float16"), ("bfloat16", "int8"), ("float16", "float8_e4m3fn")]

    def compiled(page_sizes, options):
        return job(
            "compile_prefill",
            timeout=1800,
            env=env,
            head_size=head_size,
            page_sizes=page_sizes,
            dtypes=dtypes + more if LONG else dtypes,
            options=options,
        )

    reports = compiled([16, 32, 64, 128] if LONG else [16], [everything])
    if LONG:
        reports += compiled([16], [{}, {"causal": False, "return_lse": True}])
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


@pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_match_the_oracle(seed):
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
    result = job("run_case", timeout=400, case=case, config=config)
    assert check(result) is None, (case, config, result)
