"""The attention kernels of the targets, compiled for a GPU that is not here: what they take of it, and their floors.

Runs in a process of its own (`kernels_pallas.compile_job`), which Mosaic GPU tells by environment variables to write each
kernel's PTX and ptxas' words on it into a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import calls
from benchmarks.gpu.batches import LLAMA_8B, attention_bytes, attention_flops
from benchmarks.gpu.decode import PAGE_SIZE
from kernels_pallas import SharedPrefixes, shared_prefix_attention
from kernels_pallas.gpu_target import compile_for, device_mesh, get_target

DUMP = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
"""With MOSAIC_GPU_DUMP_TO naming a folder."""

_REGISTERS_PER_CORE = 65_536
_WARPS_PER_CORE = 64
_RESERVED_PER_BLOCK = 1024

CALLS = {
    "64 x 4 k decode": ((4096, 1),) * 64,
    "16 x 8 k decode": ((8192, 1),) * 16,
    "1 x 128 k decode": ((131_072, 1),),
    "1 x 8 k prompt": ((8192, 8192),),
    "shared prefix, 64 over 4 k": ((4096 + 128, 1),) * 64,
}
"""Rows (context, query tokens) of each target's call."""


@dataclass(frozen=True)
class Kernel:
    """One kernel; occupancy is of a core with nothing else on it."""

    name: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    threads: int
    matmuls: int
    """wgmma instructions in the PTX."""
    loads: int
    """TMA loads into shared memory, likewise."""

    def blocks_per_core(self, shared_memory_per_core: int) -> int:
        warps = -(-self.threads // 32)
        registers = -(-self.registers * 32 // 256) * 256 * warps
        return min(
            shared_memory_per_core // (self.shared_memory + _RESERVED_PER_BLOCK),
            _REGISTERS_PER_CORE // registers,
            _WARPS_PER_CORE // warps,
        )


def measure(call: str, target: str) -> dict[str, Any]:
    """Kernels, floor and temporaries of one of `CALLS`."""
    rows, gpu = CALLS[call], get_target(target)
    attend, arguments = _call(call, rows)
    compiled = compile_for(device_mesh(target), attend, arguments)
    num_bytes = attention_bytes(LLAMA_8B, rows)
    if call.startswith("shared"):
        num_bytes -= (len(rows) - 1) * 4096 * LLAMA_8B.kv_bytes()
    flops = attention_flops(LLAMA_8B, rows)
    kernels = _kernels(Path(os.environ["MOSAIC_GPU_DUMP_TO"]))
    return {
        "num_bytes": num_bytes,
        "flops": flops,
        "floor_seconds": max(num_bytes / gpu.bytes_per_second, flops / gpu.bf16_flops_per_second),
        "temporaries": compiled.memory.temporaries,
        "kernels": [
            {**asdict(k), "blocks_per_core": k.blocks_per_core(gpu.shared_memory_per_core)}
            for k in kernels
        ],
    }


def _call(call: str, rows: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    heads, num_rows = LLAMA_8B, len(rows)
    decode = all(tokens == 1 for _, tokens in rows)
    options = {"scale": heads.size**-0.5}
    longest = max(context for context, _ in rows)
    num_pages = sum(-(-context // PAGE_SIZE) for context, _ in rows) + 1
    num_tokens = sum(tokens for _, tokens in rows)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q_tnh = jax.ShapeDtypeStruct((num_tokens, heads.queries, heads.size), jnp.bfloat16)
    shape = (num_pages, heads.kv, PAGE_SIZE, heads.size)
    pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    width = -(-longest // PAGE_SIZE)
    arrays = (q_tnh, (pages, pages), integers(num_rows, width), integers(num_rows))
    arrays = (*arrays, integers(num_rows + 1))
    if not call.startswith("shared"):
        attend = calls.attention("mosaic_gpu", decode_only=decode, **options)
        return attend, arrays
    prefixes = (integers(1, width), integers(1), integers(2))

    def attend_shared(*arrays: Any) -> Any:
        *plain, prefixes = arrays
        return shared_prefix_attention(
            *plain,
            SharedPrefixes(*prefixes),
            decode_only=True,
            implementation="mosaic_gpu",
            **options,
        )

    return attend_shared, (*arrays, prefixes)


def _kernels(folder: Path) -> list[Kernel]:
    found = []
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        ptxas = path.with_suffix(".ptxas").read_text()
        name = re.sub(r"_\d+$", "", path.stem)
        resources = "".join(p.read_text() for p in folder.glob(f"{name}_[0-9]*.resources.txt"))
        shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
        threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", ptx)
        found.append(
            Kernel(
                name=name,
                registers=int(re.search(r"[Uu]sed (\d+) registers", ptxas)[1]),
                spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", ptxas))),
                shared_memory=int(shared[1]) if shared else 0,
                threads=int(threads[1]) if threads else 128,
                matmuls=ptx.count("wgmma.mma_async"),
                loads=len(re.findall(r"cp\.async\.bulk\.tensor\S*shared::c\w+\.global", ptx)),
            )
        )
    return found
