"""Attention with shared prefixes by the Mosaic GPU kernels, in the interpreter with race detection. A long run."""

from __future__ import annotations

import pytest

from kernels_pallas.compile_job import run_job
from tests.kernels_pallas.mosaic_runs import QUICK_TO_COMPILE, long_run


@long_run
@pytest.mark.parametrize("num_splits", [1, 2])
def test_decodes_match_the_oracle_without_races(num_splits):
    job = "tests.kernels_pallas.mosaic_shared_prefix_jobs:check_decodes"
    result = run_job(job, {"num_splits": num_splits}, timeout=900, env=QUICK_TO_COMPILE)
    assert not result["races"]
