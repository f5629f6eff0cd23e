"""Faults in small interpreted kernels, of one module each: all of them one after another in a process."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from tests.kernels_pallas.mosaic_jobs import interpret_params, races_found


def interpreted(kernel: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The results of a kernel that takes `interpret`, on numpy arrays."""
    run = jax.jit(partial(kernel, interpret=interpret_params(), **options))
    return jax.block_until_ready(run(*jax.tree.map(jnp.asarray, args)))


def outcomes(
    module: types.ModuleType,
    faults: dict[str, tuple[str, str]],
    error_of: Callable[[types.ModuleType], float],
) -> dict[str, str]:
    """What each fault (old and new text of the module) leads to: "race", "wrong", "error: ..." or, undetected, "right".

    `error_of` runs a faulty copy of the module and may raise.
    """
    source = Path(module.__file__).read_text()
    return {name: _outcome(source, *edit, error_of) for name, edit in faults.items()}


def _outcome(source: str, old: str, new: str, error_of: Callable[..., float]) -> str:
    assert old in source, f"the kernel's source has no {old!r}"
    faulty = sys.modules["faulty"] = types.ModuleType("faulty")
    exec(compile(source.replace(old, new), "faulty", "exec"), faulty.__dict__)
    try:
        error = error_of(faulty)
        if races_found():
            return "race"
    except AssertionError:
        return "wrong"
    except Exception as problem:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        is_race = re.search(r"\brace\b", str(problem), re.IGNORECASE)
        return "race" if is_race else f"error: {str(problem)[-300:]}"
    return "right" if error < 1e-2 else "wrong"
