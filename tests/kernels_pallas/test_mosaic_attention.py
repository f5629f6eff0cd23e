"""The Mosaic GPU attention backend as a whole, in the interpreter against a float64 oracle: which kernel takes which request,
and one result out of two kernels. The kernels by themselves: test_mosaic_decode, test_mosaic_prefill.

`MOSAIC_ATTENTION_LONG=1` adds a random run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.compile_job import run_job

LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
TOLERANCE = 1e-2

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
        "kv_heads": 1,
        "decode_only": True,
    },
    "mixed": {
        "rows": [(200, 1), (3, 1), (150, 70), (90, 8), (0, 0), (37, 37), (80, 9)],
        "group": 3,
        "head_size": 96,
        "page_size": 32,
        "padding_tokens": 5,
    },
    # At most as many tokens as the decode kernel takes, so there is no other.
    "fewer_tokens_than_the_decode_kernel_takes": {
        "rows": [(90, 3), (20, 2), (0, 0)],
        "sliding_window": 30,
        "padding_tokens": 2,
    },
}


def run(case: dict[str, Any], timeout: float = 240) -> dict[str, Any]:
    return run_job(
        "mosaic_attention_jobs:run_case",
        {"case": case, "configs": CONFIGS},
        timeout=timeout,
        python_path=(str(Path(__file__).parent),),
    )


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
def test_matches_the_oracle(name):
    result = run(CASES[name])
    print(result)
    assert check(result) is None


@pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_match_the_oracle(seed):
    rng = random.Random(seed)
    decode_only = rng.random() < 0.3
    rows = [(rng.randint(1, 700), 1) for _ in range(rng.randint(0, 3))]
    if not decode_only:
        for _ in range(rng.randint(1, 3)):
            query_len = rng.choice([rng.randint(2, 8), rng.randint(2, 150)])
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
    result = run(case, timeout=400)
    assert check(result) is None, (case, result)
