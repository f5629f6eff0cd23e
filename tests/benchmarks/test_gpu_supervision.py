"""The GPU benchmark's processes: whatever a case does, the others report."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.cases import Context
from benchmarks.gpu.run import Run, unpacked_wheels
from benchmarks.gpu.sections import Section
from benchmarks.gpu.supervise import Launcher


def section(name: str, seconds: float = 30) -> Section:
    return Section(name, name.title(), f"tests.benchmarks.{name}_section", seconds)


def run_of(tmp_path: Path, *sections: Section, seconds: float = 60) -> Run:
    launcher = Launcher(tmp_path, Context(dry=True), {"JAX_PLATFORMS": "cpu"})
    return Run(launcher, list(sections), time.time() + seconds, tmp_path)


def by_case(run: Run, name: str) -> dict:
    return {r.case: r for r in run.results if r.section == name}


def running_processes(folder: Path) -> list[str]:
    """Command lines that name `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_failing_hanging_and_dying_cases_cost_their_own_lines_only(tmp_path):
    run = run_of(tmp_path, section("faulty"), section("compiling"))
    run.all()
    results = by_case(run, "faulty")
    assert {name: r.status for name, r in results.items()} == {
        "first": "ok",
        "raises": "failed",
        "wrong": "wrong",
        "not a number": "wrong",
        "hangs": "hung",
        "dies": "died",
        "missing": "not available",
        "last": "ok",
    }
    assert "RuntimeError: the kernel did not" in results["raises"].reason
    assert "status 9" in results["dies"].reason
    assert results["last"].values["seconds"] == 2e-3
    assert by_case(run, "compiling")["good"].status == "ok"
    text = (tmp_path / "table.md").read_text()
    for line in ("| first | ok | 1 ms |", "| hangs | hung |", "| wrong | wrong, error 5.0e-01 |"):
        assert line in text
    assert not running_processes(tmp_path)


def test_a_program_that_breaks_the_compiler_is_found_and_the_rest_runs(tmp_path):
    run = run_of(tmp_path, section("compiling"))
    run.all()
    statuses = {name: r.status for name, r in by_case(run, "compiling").items()}
    assert statuses == {"good": "ok", "bad": "died", "refused": "failed", "good too": "ok"}
    assert "shared memory" in by_case(run, "compiling")["refused"].reason


def test_sections_that_prepare_are_started_early_and_run_in_their_turn(tmp_path):
    numerics = dataclasses.replace(section("faulty"), name="numerics", timed=False)
    prepared = [
        dataclasses.replace(section(name), prepared=True) for name in ("compiling", "preparing")
    ]
    run = run_of(tmp_path, numerics, *prepared)
    run.all()
    assert by_case(run, "numerics")["last"].status == "ok"
    statuses = {name: r.status for name, r in by_case(run, "compiling").items()}
    assert statuses == {"good": "ok", "bad": "died", "refused": "failed", "good too": "ok"}
    assert by_case(run, "preparing")["compiled in this process"].status == "ok"
    compiled, begun = (
        next(e["at"] for e in events(tmp_path, name) if e["event"] == kind)
        for name, kind in (("preparing-0", "compiled"), ("compiling-1", "cases"))
    )
    assert compiled < begun
    assert not running_processes(tmp_path)


def test_who_still_compiles_when_timings_begin_is_paused_until_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.run.PATIENCE", 0.0)
    numerics = Section("numerics", "Numerics", "tests.benchmarks.quick_section", 20)
    timed = dataclasses.replace(numerics, name="timed", title="Timed")
    prepared = dataclasses.replace(section("preparing"), prepared=True)
    run = run_of(tmp_path, numerics, timed, prepared)
    run.all()
    assert by_case(run, "preparing")["compiled in this process"].status == "ok"
    ended = events(tmp_path, "timed-0")[-1]
    compiled = next(e for e in events(tmp_path, "preparing-0") if e["event"] == "compiled")
    assert ended["event"] == "done" and ended["at"] < compiled["at"]


def events(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_section_ends_with_its_budget_and_the_next_one_runs(tmp_path):
    run = run_of(tmp_path, section("endless", seconds=1.5), section("compiling"))
    begin = time.time()
    run.all()
    results = by_case(run, "endless")
    assert [r.status for r in results.values()] == ["ok", "skipped", "skipped"]
    assert "time was up" in results["endless"].reason
    assert by_case(run, "compiling")["good"].status == "ok"
    assert time.time() - begin < 30
    assert not running_processes(tmp_path)


def test_sections_after_the_deadline_are_named_as_skipped(tmp_path):
    run = run_of(tmp_path, section("endless"), section("compiling"), seconds=1)
    run.all()
    assert {(r.section, r.status, r.reason) for r in run.results} == {
        (name, "skipped", "the run's time was up") for name in ("endless", "compiling")
    }
    assert '"skipped"' in (tmp_path / "results.json").read_text()


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path, monkeypatch):
    run = run_of(tmp_path, section("endless"))

    def interrupt(seconds: float) -> None:
        if (tmp_path / "endless-0.jsonl").exists() and '"endless", "limit"' in (
            tmp_path / "endless-0.jsonl"
        ).read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gpu.supervise.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.all()
    statuses = {name: r.status for name, r in by_case(run, "endless").items()}
    assert statuses == {"quick": "ok", "endless": "skipped", "never reached": "skipped"}
    assert not running_processes(tmp_path)


def test_a_section_that_cannot_start_says_why(tmp_path):
    run = run_of(tmp_path, Section("absent", "Absent", "tests.benchmarks.no_such_section", 30))
    run.all()
    (result,) = run.results
    assert result.status == "failed"
    assert "ModuleNotFoundError" in result.reason


def test_wheels_are_imported_from_without_an_installer(tmp_path):
    import zipfile

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "pack-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pack/__init__.py", "VALUE = 1\n")
    (path,) = unpacked_wheels(wheels, tmp_path)
    assert (Path(path) / "pack" / "__init__.py").read_text() == "VALUE = 1\n"
    assert unpacked_wheels(tmp_path / "none", tmp_path) == ()


def test_the_page_keeps_what_is_around_the_table(tmp_path):
    page = tmp_path / "page.md"
    marks = ("<!-- static: begin -->", "<!-- static: end -->")
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    report.put_between(page, report.STATIC, "new")
    assert page.read_text() == f"before\n{marks[0]}\nnew\n{marks[1]}\nafter\n"
    with pytest.raises(ValueError, match="no lines '<!-- measured: begin"):
        report.put_between(page, report.MEASURED, "new")
