"""What Mosaic GPU dumps of the kernels that it compiles: their PTX, ptxas' words and their resources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def dump_to(folder: Path) -> dict[str, str]:
    """The environment that makes it do so."""
    return {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
    }


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def kernel_reports(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.ptx")):
        ptx, log = path.read_text(), path.with_suffix(".ptxas").read_text(errors="replace")
        kernel = re.sub(r"_\d+$", "", path.stem)
        resources = "".join(p.read_text() for p in folder.glob(f"{kernel}_[0-9]*.resources.txt"))
        shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
        matmuls = re.findall(r"wgmma\.mma_async|wgmma\.wait_group\S* \d", ptx)
        yield {
            "kernel": kernel,
            "registers": int(re.search(r"Used (\d+) registers", log)[1]),
            "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
            "serialized": "serialized" in log,
            "shared_memory": int(shared[1]) if shared else None,
            "wgmma": sum("mma_async" in m for m in matmuls),
            "overlapped_waits": sum(m.endswith(" 1") for m in matmuls),
            "tma": ptx.count("cp.async.bulk.tensor"),
            "fences": ptx.count("fence.proxy.async"),
        }
