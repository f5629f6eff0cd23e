"""The Mosaic GPU attention kernels without a GPU: in the interpreter against a float64 oracle, with planted faults, and
compiled for the H200.

Each run is a process of its own with a time limit, as a wrong kernel may hang or abort. Two run at a time.
`MOSAIC_ATTENTION_LONG=1` adds the long random run and every page size and dtype to the compiled set.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.gpu_target import missing_compiler
from kernels_pallas.ragged_paged_attention import mosaic_gpu_config

HERE = Path(__file__).parent
LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
TOLERANCE = 1e-2
STUCK = "no progress"
"""What a job says when it ends itself because its kernel waits without end."""
needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# Two slots and eight blocks: each slot is filled four times.
DECODE = {"decode_config": {"block_tokens": 64, "stages": 2, "cores": 1, "min_blocks": 9}}
SPLIT = {"decode_config": {"block_tokens": 64, "stages": 2, "cores": 4, "min_blocks": 1}}
PREFILL = {"prefill_config": {"block_tokens": 64, "stages": 2}, **SPLIT}
LONG_BLOCKS = {"prefill_config": {"block_tokens": 128, "stages": 2}, **SPLIT}
ONE_CONSUMER = {"prefill_config": {"block_tokens": 64, "stages": 2, "consumers": 1}, **SPLIT}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode": (
        {"rows": [(500, 1), (64, 1), (0, 0), (1, 1)], "kv_heads": 1, "decode_only": True},
        DECODE,
    ),
    "decode_split_over_cores": (
        {"rows": [(700, 1), (3, 1), (130, 1)], "group": 3, "page_size": 32, "decode_only": True},
        SPLIT,
    ),
    "decode_window_and_cap": (
        {
            "rows": [(500, 1), (90, 1)],
            "kv_heads": 1,
            "group": 8,
            "head_size": 128,
            "sliding_window": 150,
            "soft_cap": 5.0,
            "decode_only": True,
        },
        SPLIT,
    ),
    "decode_pages_larger_than_blocks": (
        {
            "rows": [(300, 1), (20, 1)],
            "group": 1,
            "head_size": 80,
            "page_size": 128,
            "dtype": "float16",
            "decode_only": True,
        },
        SPLIT,
    ),
    "decode_wide_heads": (
        {"rows": [(330, 1)], "kv_heads": 1, "head_size": 256, "page_size": 64, "decode_only": True},
        SPLIT,
    ),
    "chunk_onto_context": (
        {"rows": [(500, 40), (7, 7)], "kv_heads": 1, "padding_tokens": 3},
        PREFILL,
    ),
    "mixed": (
        {
            "rows": [(200, 1), (3, 1), (150, 70), (0, 0), (37, 37)],
            "group": 3,
            "head_size": 96,
            "page_size": 32,
            "padding_tokens": 5,
        },
        PREFILL,
    ),
    "prefill_window_and_cap": (
        {
            "rows": [(450, 60), (90, 90)],
            "kv_heads": 1,
            "group": 8,
            "sliding_window": 100,
            "soft_cap": 5.0,
        },
        LONG_BLOCKS,
    ),
    "prefill_wide_heads_one_consumer": (
        {
            "rows": [(300, 30), (5, 2)],
            "kv_heads": 1,
            "group": 1,
            "head_size": 256,
            "page_size": 128,
            "dtype": "float16",
        },
        ONE_CONSUMER,
    ),
}

DECODE_FAULT_CASE = CASES["decode"]
WINDOW_FAULT_CASE = CASES["decode_window_and_cap"]
PREFILL_FAULT_CASE = CASES["chunk_onto_context"]
PREFILL_WINDOW_FAULT_CASE = CASES["prefill_window_and_cap"]
_REFILL = "            pl.when(i + stages < num_blocks)(lambda: fetch(i + stages))\n"
_PV = "            acc = tiles.matmul(weights.astype(v_s.dtype), v_s.at[slot], acc, interpret)\n"
_FREE_K = "            pl.when(is_refilled)(lambda: plgpu.barrier_arrive(k_free.at[slot]))\n"
_QK = "            scores = tiles.matmul(q_tile, k_s.at[slot].transpose((1, 0)), None, interpret)\n"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "decode_no_wait_for_keys_and_values": (
        DECODE_FAULT_CASE, "decode", [("plgpu.barrier_wait(kv_barrier.at[slot])", "pass")],
    ),
    "decode_no_wait_for_queries": (
        DECODE_FAULT_CASE, "decode", [("plgpu.barrier_wait(q_barrier)", "pass")],
    ),
    "decode_too_many_arrivals": (
        DECODE_FAULT_CASE, "decode",
        [("num_arrivals=copies,", "num_arrivals=copies + 1,")],
    ),
    "decode_too_few_arrivals": (
        DECODE_FAULT_CASE, "decode",
        [("num_arrivals=copies,", "num_arrivals=copies // 2,")],
    ),
    "decode_refill_before_use": (
        DECODE_FAULT_CASE, "decode", [(_REFILL, ""), (_PV, _REFILL + _PV)],
    ),
    "decode_refill_of_another_slot": (
        DECODE_FAULT_CASE, "decode",
        [("slot = lax.rem(i, jnp.int32(stages))\n            for", "slot = lax.rem(i + 1, jnp.int32(stages))\n            for")],
    ),
    "decode_sees_one_slot_too_many": (
        DECODE_FAULT_CASE, "decode", [("position < seq_len", "position <= seq_len")],
    ),
    "decode_unused_values_not_cleared": (
        DECODE_FAULT_CASE, "tiles", [("row < num_used", "row < num_used + block")],
    ),
    "decode_window_one_too_short": (
        WINDOW_FAULT_CASE, "decode", [("position >= window_start", "position > window_start")],
    ),
    "page_off_by_one": (
        DECODE_FAULT_CASE, "tiles",
        [("lax.clamp(first_page, page, last_page)", "lax.clamp(first_page, page + 1, last_page)")],
    ),
    "pages_before_the_window_read": (
        WINDOW_FAULT_CASE, "decode",
        [("first_page = lax.div(window_start, jnp.int32(page_size))", "first_page = jnp.int32(0)"),
         ("seen &= position >= window_start", "pass")],
    ),
    "merge_drops_the_last_item": (
        WINDOW_FAULT_CASE, "merge", [("lax.fori_loop(0, count,", "lax.fori_loop(0, count - 1,")],
    ),
    "prefill_no_wait_for_keys": (
        PREFILL_FAULT_CASE, "prefill", [("plgpu.barrier_wait(k_full.at[slot])", "pass")],
    ),
    "prefill_no_wait_for_values": (
        PREFILL_FAULT_CASE, "prefill", [("plgpu.barrier_wait(v_full.at[slot])", "pass")],
    ),
    "prefill_no_wait_for_queries": (
        PREFILL_FAULT_CASE, "prefill", [("plgpu.barrier_wait(q_barrier.at[warp_group])", "pass")],
    ),
    "prefill_no_wait_for_free_slots": (
        PREFILL_FAULT_CASE, "prefill",
        [("plgpu.barrier_wait(free.at[slot])", "None")],
    ),
    "prefill_frees_keys_before_use": (
        PREFILL_FAULT_CASE, "prefill", [(_FREE_K, ""), (_QK, _FREE_K + _QK)],
    ),
    "prefill_no_wait_for_cleared_values": (
        PREFILL_FAULT_CASE, "prefill",
        [("plgpu.barrier_wait(cleared)", "pl.when(warp_group == 0)(lambda: plgpu.barrier_wait(cleared))")],
    ),
    "prefill_sees_the_next_token": (
        PREFILL_FAULT_CASE, "prefill", [("seen = distance >= 0", "seen = distance >= -1")],
    ),
    "prefill_edge_not_masked": (
        PREFILL_FAULT_CASE, "prefill",
        [("on_edge = start - own_position > 1 - block", "on_edge = start - own_position > 0")],
    ),
    "prefill_window_one_too_long": (
        PREFILL_WINDOW_FAULT_CASE, "prefill",
        [("seen &= distance < sliding_window", "seen &= distance <= sliding_window")],
    ),
    "prefill_window_edge_not_masked": (
        PREFILL_WINDOW_FAULT_CASE, "prefill",
        [("<= share - 1 - sliding_window", "< -block - sliding_window")],
    ),
}  # fmt: skip
CORE_FAULTS = [
    "decode_no_wait_for_keys_and_values",
    "decode_too_many_arrivals",
    "decode_refill_before_use",
    "decode_sees_one_slot_too_many",
    "decode_unused_values_not_cleared",
    "page_off_by_one",
    "prefill_no_wait_for_values",
    "prefill_no_wait_for_free_slots",
    "prefill_frees_keys_before_use",
    "prefill_sees_the_next_token",
]

# JAX 0.11's interpreter lets this one pass: it doesn't order a read before the barrier that frees its slot.
UNSEEN = {"prefill_frees_keys_before_use"} if jax.__version_info__ < (0, 12) else set()


def job(function: str, timeout: float = 240, **arguments: Any) -> Any:
    return run_job(
        f"mosaic_attention_jobs:{function}", arguments, timeout=timeout, python_path=(str(HERE),)
    )


def compile_job(dump: Path, **arguments: Any) -> Any:
    dump.mkdir()
    env = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(dump),
    }
    return run_job(
        "mosaic_attention_jobs:compile_kernels",
        arguments,
        timeout=600,
        env=env,
        python_path=(str(HERE),),
    )


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Results to come of the jobs that the selected tests need, by test name, started in the tests' order."""
    dumps = tmp_path_factory.mktemp("dumps")
    pool = ThreadPoolExecutor(2)
    futures: dict[str, Future] = {}
    for item in request.session.items:
        if item.path != Path(__file__) or any(
            m.name == "skipif" and m.args[0] for m in item.own_markers
        ):
            continue
        name = item.callspec.id if hasattr(item, "callspec") else ""
        match item.originalname:
            case "test_matches_the_oracle":
                case, configs = CASES[name]
                futures[item.name] = pool.submit(job, "run_case", case=case, configs=configs)
            case "test_planted_faults_are_caught":
                (case, configs), module, edits = FAULTS[name]
                futures[item.name] = pool.submit(
                    job, "run_with_fault", case=case, configs=configs, module=module, edits=edits
                )  # fmt: skip
            case "test_compiles_for_the_h200":
                head_size = int(name)
                both = [(None, None), (1000, 30.0)]
                futures[item.name] = pool.submit(
                    compile_job,
                    dumps / name,
                    head_size=head_size,
                    page_sizes=[16, 32, 64, 128] if LONG else [16, 128],
                    dtypes=["bfloat16", "float16"] if LONG else ["bfloat16"],
                    options=[*both, (1000, None), (None, 30.0)] if LONG else both,
                )
    yield futures
    pool.shutdown(cancel_futures=True)


def check(result: dict[str, Any]) -> str | None:
    """What is wrong with a run, or None."""
    if result["races"]:
        return "race"
    if not result["finite"]:
        return "not finite"
    if not result["zeros"]:
        return "tokens of no request are not zero"
    return None if result["error"] < TOLERANCE else f"error {result['error']:.3g}"


@pytest.mark.parametrize("name", CASES)
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
        # A race or a misused barrier, noticed by the interpreter, or a wait without end. Not a slow
        # machine, nor a fault that could not be planted.
        signs = ("RACE DETECTED", "Barrier", "barrier", "Thread", STUCK)
        assert "took longer" not in str(error), error
        assert any(sign in str(error) for sign in signs), error
    print(found)
    assert found is not None


def test_rows_of_other_requests_are_not_written():
    case = {"rows": [(30, 20), (40, 12), (25, 25)], "kv_heads": 1, "padding_tokens": 6}
    assert job("unowned_rows_of_prefill", case=case, skipped=1) == {
        "written": True,
        "untouched": True,
    }


@needs_compiler
@pytest.mark.parametrize("head_size", mosaic_gpu_config.head_sizes(), ids=str)
def test_compiles_for_the_h200(head_size, runs, request):
    reports = runs[request.node.name].result()
    assert {r["kernel"] for r in reports} == {
        "paged_decode", "paged_decode_merge", "paged_prefill"
    }  # fmt: skip
    decode = mosaic_gpu_config.decode_config(head_size)
    prefill = mosaic_gpu_config.prefill_config(head_size)
    configs = {"paged_decode": decode, "paged_prefill": prefill}
    for report in reports:
        print(report)
        # Two registers, stored and loaded: decode at head size 256 with pages of several copies.
        is_tight = report["kernel"] == "paged_decode" and head_size == 256
        allowed = 16 if is_tight and report["page_size"] > 16 else 0
        assert report["spills"] <= allowed, report
        if (config := configs.get(report["kernel"])) is None:
            continue
        assert report["wgmma"] > 0, report
        assert report["tma"] > 0, report
        # Queries, cleared values and results reach wgmma and TMA through generic stores.
        assert report["fences"] >= 3, report
        if report["shared_memory"] is not None:
            assert report["shared_memory"] <= config.shared_memory(head_size, 2)
        if report["kernel"] == "paged_decode":
            # All four warps of the group are done reading before one thread refills the slot.
            assert report["syncs_before_refill"] >= 1, report
    print({name: config.bytes_in_flight(head_size, 2) for name, config in configs.items()})
    assert decode.bytes_in_flight(head_size, 2) >= 64 << 10
    assert decode.stages >= 2
    assert prefill.stages >= 2


@pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_match_the_oracle(seed):
    rng = random.Random(seed)
    decode_only = rng.random() < 0.4
    rows = [(rng.randint(1, 700), 1) for _ in range(rng.randint(0, 3))]
    if not decode_only:
        for _ in range(rng.randint(1, 3)):
            query_len = rng.randint(2, 150)
            rows.append((query_len + rng.randint(0, 400), query_len))
    rows += [(0, 0)] * rng.randint(0 if rows else 1, 2)
    case = {
        "rows": rows,
        "decode_only": decode_only,
        "head_size": rng.choice([64, 80, 96, 128, 256]),
        "kv_heads": rng.choice([1, 2]),
        "group": rng.choice([1, 3, 4, 8]),
        "page_size": rng.choice([16, 32, 64, 128]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "sliding_window": rng.choice([None, None, 1, 60, 200]),
        "soft_cap": rng.choice([None, 3.0]),
        "padding_tokens": 0 if decode_only else rng.randint(0, 9),
        "seed": seed,
    }
    result = job("run_case", timeout=300, case=case, configs=PREFILL)
    assert check(result) is None, (case, result)
