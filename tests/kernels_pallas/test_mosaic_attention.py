"""The Mosaic GPU attention backend as a whole, in the interpreter against a float64 oracle: which kernel takes which request,
and one result out of two kernels, of which the second merges what the first one cut. The kernels by themselves: test_mosaic_decode, test_mosaic_prefill.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.kernels_pallas.mosaic_runs import (
    Call,
    assert_caught,
    assert_right,
    long_run,
    outcomes_of,
    params,
    with_fault,
)

SEEDS = range(12)

CONFIGS = {
    "decode_config": {
        "block_tokens": 64,
        "slots": 3,
        "blocks_per_core": 1,
        "cores": 5,
        "min_blocks": 1,
    },
    "prefill_config": {"block_tokens": 64, "stages": 2, "cores": 2},
}

CASES: dict[str, dict[str, Any]] = {
    "one_token_each_and_empty_requests": {
        "rows": [(200, 1), (64, 1), (0, 0), (1, 1)],
        "decode_only": True,
    },
    "mixed": {
        "rows": [(500, 1), (3, 1), (150, 70), (190, 8), (0, 0), (37, 37), (80, 9)],
        "kv_heads": 2,
        "group": 3,
        "head_size": 96,
        "page_size": 32,
        "sinks": True,
        "return_lse": True,
        "padding_tokens": 5,
    },
    # Two requests are cut; of their 24 columns 8 are merged at a time, by the first of two cores one after the other.
    "mixed_8_bit": {
        "rows": [(300, 8), (500, 1), (90, 40)],
        "group": 3,
        "page_dtype": "float8_e4m3fn",
        "sinks": True,
        "sliding_window": 250,
        "soft_cap": 5.0,
        "return_lse": True,
        "padding_tokens": 2,
    },
    # At most as many tokens as the decode kernel takes, so there is no other.
    "fewer_tokens_than_the_decode_kernel_takes": {
        "rows": [(90, 3), (20, 2), (0, 0)],
        "kv_heads": 2,
        "sliding_window": 30,
        "padding_tokens": 2,
    },
}


PACKAGE = "kernels_pallas.ragged_paged_attention.mosaic_gpu"
FAULTS = {
    "merged_through_the_place_of_queries_in_use": (
        "mixed", "prefill_producer",
        [("    pl.when(turns.count > 0)(lambda: plgpu.barrier_wait(refs.q_free))\n    merge_decoded(refs, problem)\n",
          "    merge_decoded(refs, problem)\n    pl.when(turns.count > 0)(lambda: plgpu.barrier_wait(refs.q_free))\n")],
    ),
    "merges_of_the_second_round_left_out": (
        "mixed_8_bit", "prefill_producer",
        [("@pl.loop(0, lax.div(num_walks + (problem.cores - 1) - core, jnp.int32(problem.cores)))", "@pl.loop(0, 1)")],
    ),
    "columns_merged_in_one_place": (
        "mixed_8_bit", "merge",
        [("for acc in accs], first_column)", "for acc in accs], 0 * first_column)")],
    ),
    "sinks_of_the_first_columns": (
        "mixed_8_bit", "merge", [("self.columns, first_column\n", "self.columns\n")],
    ),
    "log_sum_exp_of_the_decodes_forgotten": (
        "mixed_8_bit", "prefill", [("is_own[:, None], own, others)", "is_own[:, None], own, 0.0)")],
    ),
}  # fmt: skip


def run_case(case: dict[str, Any]) -> Call:
    sizes = CONFIGS
    if case.get("head_size") == 256:
        more = {"consumers": 1, "queries_in_registers": False}
        sizes = {**CONFIGS, "prefill_config": CONFIGS["prefill_config"] | more}
    return "mosaic_attention_jobs:run_case", {"case": case, "configs": sizes}


def random_batch(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    decode_only = rng.random() < 0.3
    rows = [(rng.randint(1, 700), 1) for _ in range(rng.randint(0, 3))]
    if not decode_only:
        for _ in range(rng.randint(1, 3)):
            query_len = rng.choice([rng.randint(2, 8), rng.randint(2, 150)])
            rows.append((query_len + rng.randint(0, 400), query_len))
    rows += [(0, 0)] * rng.randint(0 if rows else 1, 2)
    return {
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


@pytest.fixture(scope="module")
def runs(request):
    calls = {
        "test_matches_the_oracle": {name: run_case(case) for name, case in CASES.items()},
        "test_planted_faults_are_caught": {
            name: with_fault(run_case(CASES[case]), f"{PACKAGE}.{module}", edits)
            for name, (case, module, edits) in FAULTS.items()
        },
        "test_random_batches_match_the_oracle": {
            str(seed): run_case(random_batch(seed)) for seed in SEEDS
        },
    }
    return outcomes_of(request, calls)


@pytest.mark.parametrize("name", params(CASES, ["mixed"]))
def test_matches_the_oracle(name, runs, request):
    assert_right(runs[request.node.name])


@long_run
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name, runs, request):
    assert_caught(runs[request.node.name])


@long_run
@pytest.mark.parametrize("seed", SEEDS)
def test_random_batches_match_the_oracle(seed, runs, request):
    assert_right(runs[request.node.name])
