"""What a run was taken on. Only reads."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "torch", "triton", "transformers",
)  # fmt: skip


def describe(repository: Path) -> dict[str, str]:
    """Date, chip and driver, versions, commit."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "GPU": _gpu(),
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "commit": _commit(repository),
        "command": " ".join(["python", *sys.argv]),
    }


def _output(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpu() -> str:
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem"
    return _output("nvidia-smi", query, "--format=csv,noheader") or "none"


def _commit(repository: Path) -> str:
    commit = _output("git", "rev-parse", "HEAD", cwd=repository)
    if not commit:
        # A copy without its history may bring the note that vendor.sh makes.
        note = repository / "build" / "gpu-wheels" / "commit"
        return f"{note.read_text().strip()}, or later" if note.exists() else "unknown"
    changed = _output("git", "status", "--porcelain", cwd=repository)
    return f"{commit}{' with changes' if changed else ''}"
