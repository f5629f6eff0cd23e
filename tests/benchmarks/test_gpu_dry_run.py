"""The GPU benchmark's dry run: every section, as on the day, on tiny shapes.

Where PyTorch is, `make test` runs the section that compares with it; the others it runs on the oldest JAX, which is what
the machine with the GPU has. `make test-kernels` runs all of them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.targets import TARGETS

REPOSITORY = Path(__file__).resolve().parents[2]
ABSENT = ("zmq", "fastapi", "uvicorn", "starlette", "gguf", "llguidance")
"""Packages that the machine with the GPU lacks and that `vendor.sh` doesn't bring."""
pytestmark = pytest.mark.jax_floor
HAS_TORCH = importlib.util.find_spec("torch") is not None
ALL = bool(os.environ.get("MOSAIC_ATTENTION_LONG")) or not HAS_TORCH
CHOSEN = [section for section in SECTIONS if ALL or section.name == "peers"]
all_sections = pytest.mark.skipif(not ALL, reason="runs on the oldest JAX, and in the long run")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[dict[str, Any], str]:
    """results.json and the printed table."""
    folder = tmp_path_factory.mktemp("dry")
    blocked = folder / "blocked"
    blocked.mkdir()
    for name in ABSENT:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not on the machine')\n")
    command = [sys.executable, "benchmarks/gpu/run.py", "--dry", "--results", str(folder)]
    command += ["--deadline", "560", "--wheels", str(folder / "none")]
    command += ["--only", *(section.name for section in CHOSEN)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(blocked)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text()), done.stdout


def numbers(values: dict[str, Any]) -> list[float]:
    return [v for v in values.values() if isinstance(v, int | float) and not isinstance(v, bool)]


def test_every_case_of_every_section_brings_numbers_or_says_why_not(dry_run):
    results, _ = dry_run
    assert {r["section"] for r in results["results"]} == {section.name for section in CHOSEN}
    for result in results["results"]:
        assert result["status"] in ("ok", "not available"), result
        if result["status"] == "ok":
            found = numbers(result["values"])
            assert found and all(map(math.isfinite, found)), result
            assert result["values"].get("seconds", 1) > 0, result
        else:
            assert result["reason"], result


def test_only_what_is_not_installed_is_not_available(dry_run):
    results, _ = dry_run
    missing = {r["case"] for r in results["results"] if r["status"] == "not available"}
    peers = {r["case"] for r in results["results"] if r["section"] == "peers"}
    assert len(peers) >= 5
    if HAS_TORCH:
        assert not missing & peers
    else:
        assert peers <= missing
    reasons = [r["reason"] for r in results["results"] if r["case"] in missing - peers]
    assert all("kernels_pallas" in reason or "has no argument" in reason for reason in reasons)


@all_sections
def test_numerics_were_compared_and_attention_was_interpreted(dry_run):
    results, _ = dry_run
    checks = [r for r in results["results"] if r["section"] == "numerics" and r["status"] == "ok"]
    for check in checks:
        assert 0 <= check["values"]["error"] <= check["values"]["tolerance"], check
    names = {check["case"] for check in checks}
    assert {"mixed, interpreted", "mixed options", "rope_kv_cache_update"} <= names


@all_sections
def test_the_engine_reports_throughput_roofline_and_busy_time(dry_run):
    results, _ = dry_run
    engine = {r["case"]: r["values"] for r in results["results"] if r["section"] == "engine"}
    long = engine["2 x 1000 in, 1000 out"]
    for name in (
        "decode_tokens_per_second", "output_tokens_per_second", "prefill_tokens_per_second",
        "fraction", "busy", "busy_by_chained_steps", "host_gap_seconds", "device_step_seconds",
    ):  # fmt: skip
        assert long[name] > 0, name
    assert long["busy"] <= 1
    assert engine["2 x 256 in, 256 out"]["output_tokens_per_second"] > 0


def test_the_table_names_sections_targets_and_what_it_ran_on(dry_run):
    results, printed = dry_run
    for section in CHOSEN:
        assert f"### {section.title}" in printed
    for target in TARGETS:
        assert f"| {target.text} |" in printed
    for key in ("date", "GPU", "versions", "commit"):
        assert results[key]
        assert f"{key}: {results[key]}" in printed
    assert "dry run" in printed
    assert results["dry"] is True
    assert set(results["section_seconds"]) == {section.name for section in CHOSEN}
