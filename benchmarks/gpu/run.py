"""Checks and times the kernels and the engine on a GPU, in under six minutes, and prints one table.

    python benchmarks/gpu/run.py [--results DIR] [--output docs/gpu_results.md]
    python benchmarks/gpu/run.py --dry

Every section runs in processes of its own under a time limit: a kernel that fails, hangs or gives wrong numbers costs its
own line and nothing else. Results so far are always on disk. Nothing here changes a setting of the GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu import report, surroundings  # noqa: E402
from benchmarks.gpu.cases import Context  # noqa: E402
from benchmarks.gpu.results import Result  # noqa: E402
from benchmarks.gpu.sections import PREPARE_DURING, SECTIONS, Section  # noqa: E402
from benchmarks.gpu.supervise import Launcher, SectionRun, Worker, settle  # noqa: E402

_LOG_CHARACTERS = 200_000

RESERVE = 4.0
"""Seconds kept for the end of the run."""

PATIENCE = 20.0
"""Seconds that compilers are waited for once the numerics are through."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in SECTIONS if args.only is None or s.name in args.only]
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as name:
        folder = Path(name)
        launcher = Launcher(
            folder=folder,
            context=Context(dry=args.dry),
            environment=environment(folder, args.dry),
            python_path=unpacked_wheels(args.wheels, folder),
        )
        run = Run(launcher, chosen, time.time() + args.deadline - RESERVE, args.results)
        try:
            run.all()
        except KeyboardInterrupt:
            print("Stopped; what there is so far:", flush=True)
        text = run.write()
    print(text, flush=True)
    if args.output is not None:
        report.put_between(args.output, report.MEASURED, text)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = made.add_argument
    add("--dry", action="store_true", help="tiny shapes on the CPU: proves that every line runs")
    add("--deadline", type=float, default=345, help="seconds for everything (default: 345)")
    add("--only", nargs="+", choices=[s.name for s in SECTIONS], metavar="SECTION")
    build = REPOSITORY / "build"
    add("--results", type=Path, default=Path(os.environ.get("OUT") or build / "gpu-bench"),
        help="folder for results.json, table.md and logs.txt (default: $OUT or build/gpu-bench)")  # fmt: skip
    add("--wheels", type=Path, default=build / "gpu-wheels",
        help="folder of wheels that the machine lacks, from vendor.sh (default: build/gpu-wheels)")  # fmt: skip
    add("--output", type=Path, metavar="PAGE", help="also put the table into this page's marks")
    return made


def environment(folder: Path, dry: bool) -> dict[str, str]:
    """Of the workers."""
    variables = {
        # Without a GPU every case says so at once, where large shapes would keep a CPU busy until the deadline.
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".cache" / "gpu-bench"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        # Processes that wait for their turn hold no more than they use.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if dry:
        variables |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        variables["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
        # Threads that wait spin, and keep a small machine from its work.
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def unpacked_wheels(wheels: Path, folder: Path) -> tuple[str, ...]:
    """A folder to import from, with the contents of all wheels; nothing where there are none."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        return ()
    site = folder / "site"
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return (str(site),)


class Run:
    """The sections one after another, the time that is left, and what came out so far."""

    def __init__(
        self, launcher: Launcher, sections: list[Section], until: float, folder: Path
    ) -> None:
        """`folder` is for what comes out: three files, however many the processes write elsewhere."""
        self.launcher, self.sections, self.until = launcher, sections, until
        self.folder = folder
        self.results: list[Result] = []
        self.seconds: dict[str, float] = {}
        self.head = surroundings.describe(REPOSITORY)
        self._prepared: dict[str, Worker] = {}
        self._spare = 0.0

    def all(self) -> None:
        try:
            for section in self.sections:
                self.one(section)
                self.write()
        finally:
            for worker in self._prepared.values():
                worker.kill()

    def one(self, section: Section) -> None:
        begin = time.time()
        if begin + 2 > self.until:
            reason = "the run's time was up"
            self.results.append(Result(section.name, "(all)", "skipped", reason))
            return
        if section.name == PREPARE_DURING:
            self.prepare()
        budget = section.seconds * self.launcher.context.patience + self._spare
        until = min(begin + budget, self.until)
        prepared = self._prepared.pop(section.name, None)
        running = SectionRun(self.launcher, section, until, prepared)
        try:
            running.run()
        finally:
            results = running.results()
            self.results += results
            self.seconds[section.name] = round(time.time() - begin, 1)
        if section.name == PREPARE_DURING:
            left = max(until - time.time(), 0)
            settle(self._prepared.values(), min(left, PATIENCE))
        self._spare = max(0.0, budget - (time.time() - begin))
        self._learn(results)
        print(_progress(section, results, self.seconds[section.name]), flush=True)

    def prepare(self) -> None:
        """Correctness takes no notice of what else the machine does; timings would."""
        for section in self.sections:
            if section.prepared:
                self._prepared[section.name] = self.launcher.start(section, self.until, held=True)

    def _learn(self, results: list[Result]) -> None:
        """Later sections compare with the peaks of this run."""
        found = {r.case: r.values for r in results if r.section == "peaks" and r.status == "ok"}
        changes = {}
        if "copy" in found:
            changes["bandwidth"] = found["copy"]["bytes_per_second"]
        if "matmul" in found:
            changes["matmul"] = found["matmul"]["flops_per_second"]
        if changes:
            self.launcher = replace(
                self.launcher, context=replace(self.launcher.context, **changes)
            )

    def write(self) -> str:
        """The table, which is also written to the folder, as are everything in JSON and the processes' logs."""
        dry = self.launcher.context.dry
        text = report.render(self.head, self.sections, self.results, dry)
        (self.folder / "table.md").write_text(text)
        content = report.as_json(self.head, self.results, self.seconds, dry)
        report.write_json(self.folder / "results.json", content)
        logs = sorted(self.launcher.folder.glob("*.log"))
        (self.folder / "logs.txt").write_text(
            "\n".join(f"==== {log.stem}\n{_end_of(log)}" for log in logs)
        )
        return text


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_CHARACTERS:]


def _progress(section: Section, results: list[Result], seconds: float) -> str:
    counts = dict.fromkeys(dict.fromkeys(r.status for r in results), 0)
    for result in results:
        counts[result.status] += 1
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{section.name}: {parts} in {seconds:.0f} s"


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
