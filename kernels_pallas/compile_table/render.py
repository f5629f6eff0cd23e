"""The table as Markdown, and back: which combinations a written table names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product

from kernels_pallas.compile_table.case import Case
from kernels_pallas.compile_table.measure import Row
from kernels_pallas.gpu_target import get_target

_COLUMNS = (
    "kernel", "size", "page size", "dtype", "cache", "options",
    "registers", "spilled", "shared memory", "threads", "blocks per SM", "in flight per SM", "stages",
    "wgmma", "TMA in", "TMA out", "loads in loops", "stores in loops",
)  # fmt: skip
_SAME = "same"

_NOTES = """\
Every combination that the operations claim, compiled for a GPU that was not there. Written by the command, never by hand;
it fails, and says why, when a kernel spills, overflows shared memory, has under 2 stages or too little in flight, lacks an
instruction that it lives from, stores from its inner loop by threads, or does things in an order that only works by luck.

- A row stands for all the combinations of the page sizes and dtypes that it lists; numbers are their range. *size*: of a head, or
  of a row where there are no heads.
- *registers, spilled*: of the code that XLA's pipeline makes, spilled bytes stored and loaded. *shared memory*: KiB of a thread
  block, barriers included. *blocks per SM*: by registers, shared memory and threads.
- *in flight per SM*: KiB of loads on their way while one stage of each block's ring is worked on.
- *wgmma, TMA in, TMA out*: instructions in the PTX. *loads in loops, stores in loops*: of global memory by threads, in the
  innermost loops that copy or multiply (page numbers are loaded there).
- Order, along every path of the PTX: stores to shared memory are fenced and met at a barrier before wgmma or TMA touch
  shared memory, registers are fenced before wgmma and waited for after it, and memory is given back after the wait.
"""


def render(rows: Sequence[Row], target: str) -> str:
    title = f"# The kernels, compiled for the {get_target(target).device_name}"
    lines = [title, "", "Written by `python -m kernels_pallas.compile_table`.", _NOTES]
    for operation in dict.fromkeys(row.case.operation for row in rows):
        own = [row for row in rows if row.case.operation == operation]
        lines += [f"## {operation}", ""]
        lines += [f"{len({row.case for row in own})} combinations, with JAX {version('jax')}.", ""]
        lines += [*_table(_groups(own)), ""]
        ignoring = sorted({row.kernel for row in own if row.ignores_register_counts})
        if ignoring:
            lines += [f"ptxas ignores `setmaxnreg` in {', '.join(ignoring)}.", ""]
        if problems := problem_lines(own):
            lines += ["Problems:", "", *(f"- {problem}" for problem in problems), ""]
    return "\n".join(lines)


def with_others_of(old: str, new: str, order: Iterable[str]) -> str:
    """The rendered table `new`, and from `old` the operations that it has not; in the given order."""
    title, *_ = new.partition("\n## ")
    sections = _sections(old) | _sections(new)
    return title + "".join(f"\n## {sections[name]}\n" for name in order if name in sections)


def _sections(text: str) -> dict[str, str]:
    return {s.splitlines()[0]: s.rstrip("\n") for s in text.split("\n## ")[1:]}


def problem_lines(rows: Iterable[Row]) -> list[str]:
    return [f"{row.case}, {row.kernel}: {problem}" for row in rows for problem in row.problems]


@dataclass(frozen=True)
class _Group:
    """Rows of one kernel that are every combination of some page sizes and dtypes."""

    rows: tuple[Row, ...]

    def listed(self, name: str) -> list:
        return list(dict.fromkeys(getattr(row.case, name) for row in self.rows))

    def numbers(self, name: str, unit: int = 1) -> str:
        values = [getattr(row, name) for row in self.rows]
        if None in values:
            return ""
        low, high = (
            f"{value / unit:.1f}".removesuffix(".0") for value in (min(values), max(values))
        )
        return low if low == high else f"{low} to {high}"


def _groups(rows: Sequence[Row]) -> list[_Group]:
    by_key: dict[tuple, list[Row]] = {}
    for row in rows:
        case = row.case
        cache = _SAME if case.cache_dtype == case.dtype else case.cache_dtype
        by_key.setdefault((row.kernel, case.options, cache, case.size), []).append(row)
    groups = []
    for _, members in sorted(by_key.items(), key=lambda item: item[0]):
        group = _Group(tuple(members))
        combinations = len(group.listed("page_size")) * len(group.listed("dtype"))
        # A gap in the middle: say each by itself.
        groups += [group] if combinations == len(members) else [_Group((row,)) for row in members]
    return groups


def _table(groups: Sequence[_Group]) -> list[str]:
    lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for group in groups:
        case = group.rows[0].case
        lines.append(
            (
                group.rows[0].kernel,
                str(case.size),
                ", ".join(map(str, sorted(group.listed("page_size")))),
                ", ".join(group.listed("dtype")),
                _SAME if case.cache_dtype == case.dtype else case.cache_dtype,
                case.options,
                group.numbers("registers"),
                group.numbers("spilled_bytes"),
                group.numbers("shared_memory", 1024),
                group.numbers("num_threads"),
                group.numbers("blocks_per_core"),
                group.numbers("bytes_in_flight", 1024),
                group.numbers("stages"),
                group.numbers("matmuls"),
                group.numbers("loads"),
                group.numbers("stores"),
                group.numbers("loop_loads"),
                group.numbers("loop_stores"),
            )
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def named_cases(text: str) -> dict[Case, set[str]]:
    """The combinations that a rendered table names, and of each the kernels."""
    found: dict[Case, set[str]] = {}
    operation = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"## (\w+)", line):
            operation = heading[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(_COLUMNS) or not cells[1].isdigit():
            continue
        kernel, size, page_sizes, dtypes, cache, options, *_ = cells
        for page_size, dtype in product(page_sizes.split(", "), dtypes.split(", ")):
            cache_dtype = dtype if cache == _SAME else cache
            case = Case(operation, int(size), int(page_size), dtype, cache_dtype, options)
            found.setdefault(case, set()).add(kernel)
    return found
