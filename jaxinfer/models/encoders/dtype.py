"""In what an encoder is quickest where nobody says."""

from __future__ import annotations

from pathlib import Path

_CPU_FLAGS = ("amx_bf16", "avx512_bf16")


def quickest_dtype(device: str) -> str:
    """bfloat16 where the device multiplies it faster than float32: sums, norms and the stream between layers are float32
    all the same, and the embeddings' directions stay the same to four digits."""
    if device == "gpu":
        return "bfloat16"
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "float32"
    flags = next((line for line in known.splitlines() if line.startswith("flags")), "").split()
    return "bfloat16" if set(_CPU_FLAGS) & set(flags) else "float32"
