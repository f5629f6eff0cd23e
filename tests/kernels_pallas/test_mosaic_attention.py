"""The Mosaic GPU attention backend as a whole, in the interpreter against a float64 oracle: which kernel takes which request,
and one result out of two kernels. The kernels by themselves: test_mosaic_decode, test_mosaic_prefill.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.kernels_pallas.mosaic_runs import Call, assert_right, long_run, outcomes_of, params

SEEDS = range(12)

CONFIGS = {
    "decode_config": {
        "block_tokens": 64,
        "slots": 3,
        "blocks_per_core": 1,
        "cores": 3,
        "min_blocks": 1,
    },
    "prefill_config": {"block_tokens": 64, "stages": 2, "cores": 3},
}

CASES: dict[str, dict[str, Any]] = {
    "one_token_each_and_empty_requests": {
        "rows": [(200, 1), (64, 1), (0, 0), (1, 1)],
        "decode_only": True,
    },
    "mixed": {
        "rows": [(200, 1), (3, 1), (150, 70), (90, 8), (0, 0), (37, 37), (80, 9)],
        "kv_heads": 2,
        "group": 3,
        "head_size": 96,
        "page_size": 32,
        "padding_tokens": 5,
    },
    # At most as many tokens as the decode kernel takes, so there is no other.
    "fewer_tokens_than_the_decode_kernel_takes": {
        "rows": [(90, 3), (20, 2), (0, 0)],
        "kv_heads": 2,
        "sliding_window": 30,
        "padding_tokens": 2,
    },
}


def run_case(case: dict[str, Any]) -> Call:
    return "mosaic_attention_jobs:run_case", {"case": case, "configs": CONFIGS}


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
        "test_random_batches_match_the_oracle": {
            str(seed): run_case(random_batch(seed)) for seed in SEEDS
        },
    }
    return outcomes_of(request, calls)


@pytest.mark.parametrize("name", params(CASES, ["mixed"]))
def test_matches_the_oracle(name, runs, request):
    assert_right(runs[request.node.name])


@long_run
@pytest.mark.parametrize("seed", SEEDS)
def test_random_batches_match_the_oracle(seed, runs, request):
    assert_right(runs[request.node.name])
