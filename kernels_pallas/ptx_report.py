"""Registers, spills and instructions of the kernels whose PTX a compilation dumped."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MOSAIC_DUMP = {"MOSAIC_GPU_DUMP_PTX": "1"}
"""Environment that makes Mosaic GPU write each kernel's PTX, with MOSAIC_GPU_DUMP_TO naming a directory."""


@dataclass(frozen=True)
class PtxReport:
    """One kernel as ptxas compiles it."""

    kernel: str
    registers: int
    spilled_bytes: int
    """Stored to and loaded from local memory."""
    instructions: Counter[str]
    """How often each opcode stands in the PTX, with its suffixes ("cp.async.bulk.commit_group")."""

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`."""
        return sum(n for opcode, n in self.instructions.items() if opcode.startswith(prefix))


def ptxas() -> Path:
    """The wheels' own ptxas. Raises `RuntimeError` when there is none."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in Path(root).glob("*/bin/ptxas"):
            return found
    raise RuntimeError("No ptxas: pip install 'jax[cuda13]' brings it (nvidia-cuda-nvcc).")


def report(ptx: Path, architecture: str = "sm_90a") -> PtxReport:
    """Compile one dumped file that holds one kernel. Raises `RuntimeError` with what ptxas says when it refuses."""
    command = [ptxas(), "-v", f"-arch={architecture}", ptx, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas refuses {ptx.name}: {done.stderr[:2000]}")

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    kernel = re.search(r"Compiling entry function '([^']+)'", done.stderr)
    return PtxReport(
        kernel=kernel[1] if kernel else ptx.stem,
        registers=number(r"Used (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        instructions=Counter(
            re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)[ ;]", ptx.read_text(), re.MULTILINE)
        ),
    )


def reports(directory: Path) -> list[PtxReport]:
    """Of every PTX file in a dump directory, by name."""
    return [report(path) for path in sorted(directory.glob("*.ptx"))]
