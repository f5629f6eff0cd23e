"""One process that runs a section's cases and writes what happens to a file, a JSON object per line.

The parent (`supervise`) reads the file and ends the process when a case takes too long. A case that leaves the device
unusable ends the process too; the parent starts another for the cases that are left.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Context
from benchmarks.gpu.results import NotAvailable
from benchmarks.gpu.sections import Section

DEVICE_LOST = 17
"""Exit status: the device answers no more, the last reported case is the likely culprit."""
_COMPILE_THREADS = 6


class Events:
    """Writes events at once, so that nothing is lost with the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")


def main(argument: str) -> int:
    job = json.loads(argument)
    events = Events(Path(job["events"]))
    section = Section(**job["section"])
    done = set(job["done"])
    context = Context(**job["context"])
    cases = [case for case in section.cases(context) if case.name not in done]
    events("cases", names=[case.name for case in cases])
    programs: dict[str, Future] = {}
    if job["compile_ahead"]:
        if (calls := sys.modules.get("benchmarks.gpu.calls")) is not None:
            calls.import_kernels()
        events("compiling")
        programs = start_compiling(cases)
        tell = threading.Thread(target=tell_when_compiled, args=(programs, events), daemon=True)
        tell.start()
        if section.timed or job["go"]:
            tell.join()
    until = wait_for_go(Path(job["go"])) if job["go"] else job["until"]
    for case in cases:
        if time.time() + 1 > until:
            break
        events("start", case=case.name, limit=context.patience * case.limit)
        fields = run_case(case, programs.get(case.name))
        lost = fields["status"] == "failed" and not device_answers()
        events("result", case=case.name, **fields)
        if lost:
            return DEVICE_LOST
    events("done")
    return 0


def start_compiling(cases: list[Case]) -> dict[str, Future]:
    """Begin to compile what can be, side by side. What fails fails again in its case."""
    pool = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="compile")
    return {case.name: pool.submit(case.compile) for case in cases if case.compile is not None}


def tell_when_compiled(programs: dict[str, Future], events: Events) -> None:
    wait(programs.values())
    events("compiled")


def wait_for_go(path: Path) -> float:
    """Until it is this process's turn; returns when that ends."""
    while not path.exists():
        time.sleep(0.02)
    return float(path.read_text())


def run_case(case: Case, program: Future | None) -> dict[str, Any]:
    """Status, reason and values."""
    start = time.perf_counter()
    try:
        if program is not None:
            program.result()
        elif case.compile is not None:
            case.compile()
        values = case.run()
    except NotAvailable as error:
        return {"status": "not available", "reason": str(error), "values": {}}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        traceback.print_exc()
        return {"status": "failed", "reason": text[:600], "values": {}}
    values["case_seconds"] = round(time.perf_counter() - start, 2)
    if not values.get("error", 0.0) <= values.get("tolerance", 0.0):
        reason = f"error {values['error']:.2g} exceeds {values['tolerance']:.2g}"
        return {"status": "wrong", "reason": reason, "values": values}
    return {"status": "ok", "reason": "", "values": values}


def device_answers() -> bool:
    """Whether a failure left the device usable: an illegal access spoils every later call of the process."""
    checks: list[Callable[[], object]] = []
    if "jax" in sys.modules:
        import jax.numpy as jnp

        checks.append(lambda: (jnp.arange(8) + 1).block_until_ready())
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            checks.append(lambda: (torch.zeros(8, device="cuda") + 1).cpu())
    try:
        for check in checks:
            check()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
