"""`python -m kernels_pallas.compile_table`: compile every claimed combination for a GPU, check it, write the table.

Exits with 1 and a list when a kernel does not keep what it claims.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.compile_table.case import Case, select, spread
from kernels_pallas.compile_table.measure import Row
from kernels_pallas.compile_table.operations import OPERATIONS, claims
from kernels_pallas.compile_table.render import problem_lines, render, with_others_of
from kernels_pallas.gpu_target import TARGETS

_CASES_PER_PROCESS = 24


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    cases = select(claims(), args.select)
    if args.operations:
        cases = [case for case in cases if case.operation in args.operations]
    if args.spread:
        cases = spread(cases)
    if not cases:
        print(f"compile_table: nothing claimed has {args.select} in its name.", file=sys.stderr)
        return 1
    if args.list:
        print(*cases, sep="\n")
        return 0
    rows, failures = compile_cases(cases, args.target, args.jobs)
    failures += problem_lines(rows)
    text = render(rows, args.target)
    if args.output is not None and args.operations and args.output.exists():
        text = with_others_of(args.output.read_text(), text, OPERATIONS)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text)
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_pallas.compile_table",
        description="Compile the kernels for a GPU that is not here, in every shape that they claim.",
    )
    add = parser.add_argument
    add("--select", nargs="+", default=[], metavar="WORDS",
        help="only cases with all of these in their names, e.g. 'size 64,' sinks")  # fmt: skip
    add("--operations", nargs="+", default=[], choices=sorted(OPERATIONS),
        help="only cases of these; what --output already says of others is kept")  # fmt: skip
    add("--spread", action="store_true", help="few cases that hold every size, dtype and option")
    add("--list", action="store_true", help="print the cases' names and compile nothing")
    add("--target", default="h200", choices=sorted(TARGETS))
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--output", type=Path, help="write the table here")
    return parser


def compile_cases(cases: Sequence[Case], target: str, jobs: int) -> tuple[list[Row], list[str]]:
    """Rows of all cases, and what failed to compile."""
    size = min(_CASES_PER_PROCESS, -(-len(cases) // jobs))
    parts = [cases[i : i + size] for i in range(0, len(cases), size)]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda part: _compile_part(part, target), parts))
    rows = [row for result in results if not isinstance(result, str) for row in result]
    return rows, [result for result in results if isinstance(result, str)]


def _compile_part(cases: Sequence[Case], target: str) -> list[Row] | str:
    arguments = {"cases": [asdict(case) for case in cases], "target": target}
    try:
        rows = run_job(
            "kernels_pallas.compile_table.measure:measure",
            arguments,
            timeout=60 + 30 * len(cases),
            env={"JAX_ENABLE_COMPILATION_CACHE": "false"},
        )
    except JobError as error:
        return f"{cases[0]} to {cases[-1]}: {error}"
    return [Row.from_json(row) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
