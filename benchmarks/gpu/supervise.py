"""Runs a section in worker processes, each case under its time limit, whatever the cases do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Context
from benchmarks.gpu.results import Result
from benchmarks.gpu.sections import Section

REPOSITORY = Path(__file__).resolve().parents[2]
_POLL = 0.05
_START_LIMIT = 60.0
"""Seconds from a process's start to its list of cases."""
_MAX_STARTS = 7


@dataclass
class Worker:
    """One process and what it has written so far."""

    process: subprocess.Popen
    events: Path
    log: Path
    _go: Path
    _read: int = 0

    @property
    def is_preparing(self) -> bool:
        """Of a held worker: whether it still compiles."""
        if self.process.poll() is not None:
            return False
        return not (self.events.exists() and '"compiled"' in self.events.read_text())

    def pause(self) -> None:
        """Until its turn."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)

    def go(self, until: float) -> None:
        """It is its turn."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        temporary = self._go.with_suffix(".tmp")
        temporary.write_text(str(until))
        temporary.replace(self._go)

    def new_events(self) -> list[dict[str, Any]]:
        if not self.events.exists():
            return []
        with self.events.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]

    def kill(self) -> None:
        """The process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        return lines[-1][:300] if lines else "it said nothing"


@dataclass(frozen=True)
class Launcher:
    """Starts workers that share a folder for their files and an environment."""

    folder: Path
    context: Context
    environment: dict[str, str]
    python_path: tuple[str, ...] = ()

    def start(
        self,
        section: Section,
        until: float,
        *,
        done: tuple[str, ...] = (),
        compile_ahead: bool = True,
        held: bool = False,
        attempt: int = 0,
    ) -> Worker:
        """A process for the section's cases but `done`. A `held` one compiles and waits for `Worker.go`."""
        stem = f"{section.name}-{attempt}"
        events, log, go = (self.folder / f"{stem}{end}" for end in (".jsonl", ".log", ".go"))
        job = {
            "section": asdict(section),
            "events": str(events),
            "context": asdict(self.context),
            "done": list(done),
            "until": until,
            "compile_ahead": compile_ahead,
            "go": str(go) if held else "",
        }
        paths = [str(REPOSITORY), *self.python_path]
        inherited = os.environ.get("PYTHONPATH")
        environment = {**os.environ, **self.environment}
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(job)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Worker(process, events, log, go)


def settle(workers: Iterable[Worker], patience: float) -> None:
    """Wait for held workers to end their compiling; who isn't through then goes on in its turn."""
    workers, end = list(workers), time.time() + patience
    while time.time() < end and any(worker.is_preparing for worker in workers):
        time.sleep(_POLL)
    for worker in workers:
        worker.pause()


class SectionRun:
    """Every case's result, also of those that hung, took their process down or found no time."""

    def __init__(
        self, launcher: Launcher, section: Section, until: float, prepared: Worker | None = None
    ) -> None:
        """`prepared`: a held worker of the section."""
        self.launcher, self.section, self.until = launcher, section, until
        self._prepared = prepared
        self._names: list[str] = []
        self._results: dict[str, Result] = {}
        self._reason = "the section's time was up"

    def results(self) -> list[Result]:
        """At any time; cases that have none yet are reported as skipped."""
        name = self.section.name
        if not self._names:
            return [Result(name, "(start)", "failed", self._reason)]
        skipped = {n: Result(name, n, "skipped", self._reason) for n in self._names}
        return list({**skipped, **self._results}.values())

    def run(self) -> None:
        """Until all cases are done or the time is up. An exception ends the worker too."""
        compile_ahead = True
        for attempt in range(_MAX_STARTS):
            if attempt and time.time() + 2 > self.until:
                return
            watch = _Watch(self._start(attempt, compile_ahead), self)
            finished = watch.run()
            if finished:
                return
            if watch.compiles:
                # One of many: compiled one by one, the culprit is known.
                compile_ahead = False
            elif watch.current is None:
                self._reason = watch.trouble
                return
        self._reason = f"the worker was started {_MAX_STARTS} times"

    def _start(self, attempt: int, compile_ahead: bool) -> Worker:
        if attempt == 0 and self._prepared is not None:
            self._prepared.go(self.until)
            return self._prepared
        return self.launcher.start(
            self.section,
            self.until,
            done=tuple(self._results),
            compile_ahead=compile_ahead,
            attempt=attempt,
        )

    def take_names(self, names: list[str]) -> None:
        self._names = self._names or names

    def record(
        self, case: str, status: str, reason: str, values: dict[str, Any] | None = None
    ) -> None:
        self._results[case] = Result(self.section.name, case, status, reason, values or {})


class _Watch:
    """Follows one worker to its end."""

    def __init__(self, worker: Worker, section: SectionRun) -> None:
        self.worker, self.section = worker, section
        self.state = "starting"
        self.current: str | None = None
        """The case that was started last."""
        self.compiles = False
        """Whether programs are compiled ahead, perhaps beside a case."""
        self.trouble = ""
        """Why it ended before its cases did."""
        self._limit = time.time() + _START_LIMIT

    def run(self) -> bool:
        """Whether nothing is left to do: all cases were run, or the time is up."""
        try:
            return self._follow()
        finally:
            if self.worker.process.poll() is None:
                self.worker.kill()
            # What was reported meanwhile counts, whatever ended the watch.
            self._take_new()

    def _follow(self) -> bool:
        while True:
            ended = self.worker.process.poll() is not None
            self._take_new()
            if self.state == "done":
                return True
            if ended:
                return self._died()
            now = time.time()
            if now > self.section.until:
                if self.state == "running":
                    self._record("skipped", "stopped when the section's time was up")
                return True
            if now > self._limit:
                self.worker.kill()
                doing = "compiling" if self.compiles else self.state
                self.trouble = f"the worker was stuck while {doing}"
                if self.state == "running":
                    self._record("hung", "stopped at its time limit")
                    self.compiles = False
                return False
            time.sleep(_POLL)

    def _died(self) -> bool:
        status = self.worker.process.returncode
        how = f"died of signal {-status}" if status < 0 else f"ended with status {status}"
        self.trouble = f"the worker {how}: {self.worker.last_words()}"
        if self.state == "running" and not self.compiles:
            self._record("died", self.trouble)
        return False

    def _take_new(self) -> None:
        for event in self.worker.new_events():
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "cases":
            self.section.take_names(event["names"])
            self.state = "ready"
        elif kind == "compiling":
            # All of it together may take most of the section's time, not all.
            left = max(self.section.until - time.time(), 0)
            self.compiles, self._limit = True, time.time() + 0.6 * left
        elif kind == "compiled":
            self.compiles = False
            if self.state != "running":
                self._limit = time.time() + _START_LIMIT
        elif kind == "start":
            self.state, self.current = "running", event["case"]
            self._limit = time.time() + event["limit"]
        elif kind == "result":
            self.state, self._limit = "ready", time.time() + _START_LIMIT
            self._record(event["status"], event["reason"], event["values"])
        elif kind == "done":
            self.state = "done"

    def _record(self, status: str, reason: str, values: dict[str, Any] | None = None) -> None:
        assert self.current is not None
        self.section.record(self.current, status, reason, values)
