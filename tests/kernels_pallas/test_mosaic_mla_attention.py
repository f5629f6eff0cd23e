"""The Mosaic GPU latent attention without a GPU: in the interpreter against a float64 oracle, with planted faults, and
compiled for the H200. What CI leaves to the long run: see mosaic_runs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernels_pallas.mla_attention.mosaic_gpu_config import tuned_config
from tests.gpu_compiler import needs_compiler
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

SEEDS = range(12)
SIZES = {"query_tiles": 2}
# Three slots of the ring and ten blocks: each slot is filled three times and more. One thread block does everything.
WHOLE = {**SIZES, "stages": 3, "cores": 1}
SPLIT = {**SIZES, "stages": 4, "cores": 4, "start_blocks": 0, "snap_blocks": 1, "min_blocks": 2}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode": (
        {"rows": [(300, 1), (0, 0), (1, 1), (85, 1)], "heads": 16, "decode_only": True},
        WHOLE,
    ),
    "decode_split_over_cores": (
        {"rows": [(200, 1), (3, 1)], "heads": 128, "page_size": 64, "decode_only": True},
        {**SPLIT, "cores": 6},
    ),
    "mixed": (
        {
            "rows": [(90, 1), (70, 3), (0, 0), (40, 9)],
            "heads": 16,
            "page_size": 128,
            "padding_tokens": 5,
        },
        {**SPLIT, "cores": 3},
    ),
    "odd_heads": (
        {"rows": [(70, 6), (40, 1)], "heads": 24, "page_size": 32, "dtype": "float16"},
        {**SPLIT, "query_tiles": 3, "cores": 2},
    ),
}

DECODE, DECODE_SPLIT, MIXED = (CASES[n] for n in ("decode", "decode_split_over_cores", "mixed"))
_WAIT = "plgpu.barrier_wait(loaded.at[half * stages + slot_of(i)])"
_REFILL = "            pl.when(i + stages < num_blocks)(lambda: fetch(i + stages))\n"
_WEIGH = "            (acc, peak, total), following = with_scores(i + 1, weigh)\n"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "no_wait_for_keys": (DECODE, "_attend", [(_WAIT, "pass")]),
    "too_many_arrivals": (
        DECODE, "_attend", [("num_arrivals=2 * (block", "num_arrivals=1 + 2 * (block")],
    ),
    "too_few_arrivals": (
        DECODE, "_attend", [("num_arrivals=2 * (block", "num_arrivals=1 * (block")],
    ),
    "refill_before_use": (DECODE, "_attend", [(_REFILL, ""), (_WEIGH, _REFILL + _WEIGH)]),
    "no_wait_for_the_other_half": (
        DECODE, "_attend", [("plgpu.barrier_wait(exchanged)", "pass")],
    ),
    "scores_exchanged_in_one_buffer": (
        DECODE, "_attend", [("parity = (done + i) & 1", "parity = 0 * i")],
    ),
    "buffers_start_over_at_each_tile": (
        DECODE, "_attend", [("parity = (done + i) & 1", "parity = i & 1")],
    ),
    "own_half_counted_twice": (
        DECODE, "_attend", [("scores_s[parity, 1 - half]", "scores_s[parity, half]")],
    ),
    # With one token per tile nothing but this bounds what is seen.
    "sees_one_slot_too_many": (
        DECODE_SPLIT, "_attend",
        [("seen_until = position - start\n", "seen_until = position - start + 1\n")],
    ),
    "sees_the_next_token": (
        MIXED, "_attend", [("lax.div(row, jnp.int32(heads))", "1 + lax.div(row, jnp.int32(heads))")],
    ),
    "edge_not_masked": (
        MIXED, "_attend", [("start + block > position + 1", "start > position")],
    ),
    "unused_values_not_cleared": (
        DECODE, "_memory", [("row < num_used", "row < num_used + 32")],
    ),
    "page_off_by_one": (
        DECODE, "_attend", [("jnp.minimum(page, last_page)", "jnp.minimum(page + 1, last_page)")],
    ),
    "rows_of_the_next_request_written": (
        MIXED, "_memory", [("pl.when(token < num_tokens)", "pl.when(token < 4)")],
    ),
    "merge_drops_the_last_piece": (DECODE_SPLIT, "_merge", [("k < count,", "k < count - 1,")]),
    "piece_written_to_the_wrong_place": (
        DECODE_SPLIT, "_attend", [("2 * run + (first == 0)", "2 * run + (first > 0)")],
    ),
}  # fmt: skip
CORE_FAULTS = ["refill_before_use", "no_wait_for_the_other_half", "unused_values_not_cleared"]
SHAPES = [(heads, size, "bfloat16") for heads in (16, 32, 64, 128) for size in (16, 32, 64, 128)]
SHAPES.append((64, 64, "float16"))


def run_case(case: dict[str, Any], config: dict[str, Any]) -> Call:
    return "mosaic_mla_jobs:run_case", {"case": case, "config": config}


def random_batch(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    decode_only = rng.random() < 0.5
    rows = [(rng.randint(1, 700), 1) for _ in range(rng.randint(0, 3))]
    if not decode_only:
        for _ in range(rng.randint(1, 3)):
            query_len = rng.choice([2, 3, 5, rng.randint(6, 40)])
            rows.append((query_len + rng.randint(0, 400), query_len))
    rows += [(0, 0)] * rng.randint(0 if rows else 1, 2)
    return {
        "rows": rows,
        "decode_only": decode_only,
        "heads": rng.choice([8, 16, 24, 64, 128]),
        "page_size": rng.choice([16, 32, 64, 128]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "padding_tokens": 0 if decode_only else rng.randint(0, 9),
        "seed": seed,
    }


@pytest.fixture(scope="module")
def runs(request):
    calls = {
        "test_matches_the_oracle": {name: run_case(*batch) for name, batch in CASES.items()},
        "test_planted_faults_are_caught": {
            name: with_fault(
                run_case(*batch), f"kernels_pallas.mla_attention.mosaic_gpu{module}", edits
            )
            for name, (batch, module, edits) in FAULTS.items()
        },
        "test_random_batches_match_the_oracle": {
            str(seed): run_case(random_batch(seed), SPLIT) for seed in SEEDS
        },
    }
    return outcomes_of(request, calls, limit=600)


@pytest.mark.parametrize("name", params(CASES, ["mixed"]))
def test_matches_the_oracle(name, runs, request):
    assert_right(runs[request.node.name])


@pytest.mark.parametrize(
    "name", params(FAULTS if LONG else CORE_FAULTS, ["no_wait_for_the_other_half"])
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
def test_compiles_for_the_h200(tmp_path):
    reports = job("mosaic_mla_jobs:compile_kernels", 900, dump_to(tmp_path), shapes=SHAPES)
    assert {tuple(report["shape"]) for report in reports} == set(SHAPES)
    assert {report["kernel"] for report in reports} == {"mla_attend", "mla_merge"}
    for report in reports:
        print(report)
        assert report["spills"] == 0, report
        # Pieces of cut tiles, padded queries, the plan; not the cache.
        assert report["temporaries"] < report["cache"] * 0.75, report
        if report["kernel"] == "mla_merge":
            continue
        assert report["wgmma"] > 0, report
        if report["shared_memory"] is not None:
            assert report["shared_memory"] <= tuned_config().shared_memory
        assert report["tma"] > 0, report
        # Cleared values, results and what the ring's slots held last: before wgmma and TMA see them.
        assert report["fences"] >= 4, report
    assert tuned_config().bytes_in_flight >= 64 << 10


@needs_compiler
@long_run
def test_cache_update_is_one_kernel_in_place_on_the_h200():
    update = job("mosaic_mla_jobs:compile_update")
    assert update["kernels"] == 1
    assert update["aliased"] == update["cache"]
    assert update["temporaries"] == 0
