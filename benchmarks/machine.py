"""What a timing was taken on: the machine, the versions, and how much of the machine others used meanwhile (Linux)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may hold spaces)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def seconds_since_process_start() -> float:
    """Wall time since the kernel started this process: interpreter start-up included."""
    started = int(_stat_fields("self")[19]) / _TICKS
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_memory_bytes() -> int:
    """High-water mark of this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line")


def _machine_cpu_seconds() -> float:
    user, nice, system, _, _, irq, softirq = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS


def _tree_cpu_seconds(root: int) -> float:
    """CPU time of a process and its living descendants, waited-for children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = _stat_fields(entry)
        except OSError:  # ended meanwhile
            continue
        parents[int(entry)] = int(fields[1])
        ticks[int(entry)] = sum(int(value) for value in fields[11:15])
    members = {root}
    while grown := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= grown
    return sum(ticks.get(pid, 0) for pid in members) / _TICKS


@dataclass
class CoreMeter:
    """Cores used by one process tree (`own`) and by everything else (`other`) while the block runs."""

    pid: int
    own: float = 0.0
    other: float = 0.0

    def __enter__(self) -> CoreMeter:
        self._machine, self._tree = _machine_cpu_seconds(), _tree_cpu_seconds(self.pid)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._start
        own = _tree_cpu_seconds(self.pid) - self._tree
        self.own = own / wall
        self.other = max(0.0, _machine_cpu_seconds() - self._machine - own) / wall


def wait_until_quiet(limit: float = 0.15, window_s: float = 1.0, patience_s: float = 20.0) -> None:
    """Return once everything on the machine together uses less than `limit` cores, or patience ends."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before = _machine_cpu_seconds()
        time.sleep(window_s)
        if (_machine_cpu_seconds() - before) / window_s < limit:
            return


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> str:
    """One line for the head of a report."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{date.today()}, {cpu_model()}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def versions(*packages: str) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
