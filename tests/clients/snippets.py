"""The examples of docs/clients.md: found by name, and run as a reader would, against a server of ours."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8000"
"""Where the page says that the server is."""
LIMIT = 120.0
ALONE = {"OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Clients are told to ask nobody else."""
ENVIRONMENTS = "JAXINFER_CLIENT_ENVS"
"""Environments of clients that can't be installed beside the tests' own packages, or are too large to be: directories,
separated as in $PATH, each a Python environment with some of the clients or a directory with `node_modules`."""


@cache
def snippets() -> dict[str, tuple[str, str]]:
    """By name: its language and text. A block has its name after the language."""
    blocks = re.findall(
        r"^```(\w+) ([\w-]+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    found = {name: (language, text) for language, name, text in blocks}
    assert len(found) == len(blocks), "two examples have one name"
    return found


def interpreter(package: str) -> str:
    """Of an environment that has the package; the test is skipped where none has."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:  # a directory of that name is no package
        return sys.executable
    for directory in environments():
        if any(directory.glob(f"lib/python3*/site-packages/{package}")):
            return str(directory / "bin" / "python")
    return pytest.skip(f"no environment has the Python package {package} (${ENVIRONMENTS})")


def node_modules(package: str) -> Path:
    """The directory of an environment that has the npm package; the test is skipped where none has."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    for directory in environments():
        if (directory / "node_modules" / package).is_dir():
            return directory
    return pytest.skip(f"no environment has the npm package {package} (${ENVIRONMENTS})")


def environments() -> list[Path]:
    return [Path(path) for path in os.environ.get(ENVIRONMENTS, "").split(os.pathsep) if path]


def run_python(name: str, package: str, url: str, directory: Path) -> str:
    """What the example prints."""
    language, text = snippets()[name]
    assert language == "python"
    path = directory / "example.py"
    path.write_text(text.replace(ADDRESS, url))
    return run([interpreter(package), str(path)], directory)


def run(command: list[str], directory: Path, variables: Mapping[str, str] | None = None) -> str:
    """What it prints. It knows no key of any service, and writes into `directory`."""
    given = {
        name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ
    }
    done = subprocess.run(
        command,
        cwd=directory,
        env={**given, **ALONE, "HOME": str(directory), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
