"""Proves every entry, and writes docs/models.md: `python -m tests.models.architectures --output docs/models.md`.

What was proven before is not run again: results are kept by the checksum of everything that they depend on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.models.architectures import report
from tests.models.architectures.results import Result, Results
from tests.models.architectures.table import ENTRIES, REPOSITORY, digest

SECONDS_PER_ENTRY = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "architectures.json")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="entries, default all")
    parser.add_argument("--again", action="store_true", help="run what is known to be proven too")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - ENTRIES.keys()
    if unknown:
        parser.error(f"--only: no entries {sorted(unknown)}; there are {sorted(ENTRIES)}")

    results, failed, started = Results(arguments.cache), [], time.perf_counter()
    for name in arguments.only or sorted(ENTRIES):
        key = digest(ENTRIES[name])
        result = None if arguments.again else results.get(name, key)
        if result is None or not result.proven:
            result = _run(name)
            results.put(name, key, result)
        print(f"{name:32} {result}", flush=True)
        if not result.proven:
            failed.append(name)
    print(f"{len(failed)} failed {failed}, {time.perf_counter() - started:.0f} s")
    if arguments.output is not None:
        arguments.output.write_text(report.render(results))
    return 1 if failed else 0


def _run(name: str) -> Result:
    from tests.models.architectures.oracle import TENSOR_PARALLEL_SIZES, prove

    def give_up(*_: object) -> None:
        raise TimeoutError(f"took more than {SECONDS_PER_ENTRY} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS_PER_ENTRY)
    try:
        worst = max(prove(ENTRIES[name], size) for size in TENSOR_PARALLEL_SIZES)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Result(error=f"{type(error).__name__}: {' / '.join(lines[:6])}")
    finally:
        signal.alarm(0)
    return Result(difference=worst)


if __name__ == "__main__":
    sys.exit(main())
