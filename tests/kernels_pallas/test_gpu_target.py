"""Compiling for an H200 on a machine without one: the recipe works and its report can tell good from bad programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.gpu_target import TARGETS, device_mesh, get_target
from tests.gpu_compiler import needs_compiler

SAMPLES = Path(__file__).parent
CACHE_BYTES = 3 * 256 * 8 * 16 * 64 * 2


def job(function: str, timeout: float = 120, **arguments: Any) -> Any:
    return run_job(
        f"hlo_samples:{function}", arguments, timeout=timeout, python_path=(str(SAMPLES),)
    )


@pytest.fixture(scope="module")
def samples():
    """Of all programs, compiled in one process."""
    calls = {
        **{target: ("report", {"variant": "unrolled", "target": target}) for target in TARGETS},
        "not donated": ("report", {"variant": "unrolled", "donate": False}),
        "scanned": ("report", {"variant": "scanned"}),
        "transposed weight": ("report", {"variant": "transposed_weight"}),
        "tensor parallel": ("tensor_parallel", {"num_devices": 4}),
    }
    return job("samples", calls=calls)


@needs_compiler
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_an_unrolled_step_updates_its_caches_in_place_and_copies_nothing(target, samples):
    report = samples[target]
    assert report["alias"] == CACHE_BYTES
    assert report["inputs"] == {
        **{f"caches[{i}]": CACHE_BYTES // 3 for i in range(3)},
        **{f"weights[{i}]": 512 * 512 * 2 for i in range(3)},
        "x": 16 * 512 * 2,
        "slots": 16 * 4,
    }
    assert report["aliased_inputs"] == ["caches[0]", "caches[1]", "caches[2]"]
    assert report["moved"] == []
    matmuls = 3 * 2 * 16 * 512 * 512
    assert report["flops"] == matmuls
    weights = 3 * 512 * 512 * 2
    gathered = 3 * 16 * 8 * 16 * 64 * 2
    floor = weights + gathered
    # Above the floor: matmuls this small are split along their contraction, with float32 partial sums in between.
    assert floor < report["bytes"] < 2.5 * floor
    assert report["temporaries"] < 1 << 20


@needs_compiler
def test_without_donation_the_caches_are_copied_and_the_report_says_so(samples):
    report = samples["not donated"]
    assert report["alias"] == 0
    assert report["aliased_inputs"] == []
    assert report["moved"] == ["caches[0]", "caches[1]", "caches[2]"]


@needs_compiler
def test_a_scan_over_caches_is_reported_as_copying_them(samples):
    report = samples["scanned"]
    assert "caches" in report["moved"]


@needs_compiler
def test_a_weight_that_is_brought_into_another_layout_is_reported(samples):
    report = samples["transposed weight"]
    assert report["moved"] == ["weights[0]"]


@needs_compiler
def test_tensor_parallel_programs_count_one_device_and_its_collectives(samples):
    report = samples["tensor parallel"]
    assert report["flops"] == 2 * 16 * 512 * 512 // 4
    assert report["arguments"] == (16 * 512 + 512 * 512) * 2 // 4
    assert len(report["collectives"]) == 1
    assert report["collectives"][0].startswith("all-reduce")
    assert report["collective_bytes"] in (16 * 512 * 2, 16 * 512 * 4)


def test_unknown_targets_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"target must be one of \['h100', 'h200'\], got 'h201'"):
        get_target("h201")
    with pytest.raises(ValueError, match="h201"):
        device_mesh("h201")


def test_a_failing_job_ends_with_its_own_message():
    with pytest.raises(JobError, match=r"(?s)failed with status 1.*ValueError: on purpose"):
        job("fails")


def test_a_crashing_job_names_the_signal():
    with pytest.raises(JobError, match="died of signal 6"):
        job("crashes")


def test_a_job_that_hangs_is_stopped():
    with pytest.raises(JobError, match="took longer than 8 s"):
        job("hangs", timeout=8)
