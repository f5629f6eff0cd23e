"""Run a compile check in a process of its own, with a time limit.

A compiler that crashes, or a kernel that never ends in the interpreter, then fails one check and not the test run;
and the check gets JAX's CPU platform and XLA's optimizations whatever the caller uses.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any


class JobError(RuntimeError):
    """A compile job that crashed, failed or ran out of time; the message ends with the end of its stderr."""


def run_job(
    function: str,
    arguments: dict[str, Any],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    python_path: Sequence[str] = (),
) -> Any:
    """Call `module:function(**arguments)` in a new process on JAX's CPU platform; its result, through JSON.

    Args:
        function: The new process finds its module where this one does, or in a directory of `python_path`.
        arguments: What JSON can carry.
        timeout: Seconds, the new process's imports included.
        env: Added to the environment (dump directories, XLA_FLAGS).

    Raises `JobError`.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        # The size of XLA's thread pool. Pallas's interpreter gives each warp group of a thread block a thread of it, in
        # which it waits for the others: on a machine of two cores they would starve one another.
        "NPROC": "16",
        "PYTHONPATH": os.pathsep.join([*python_path, *(path or os.getcwd() for path in sys.path)]),
        **(env or {}),
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, "-m", __name__, function, json.dumps(arguments), result.name]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise JobError(f"{function} took longer than {timeout:g} s and was stopped.") from error
        if done.returncode != 0:
            how = (
                f"died of signal {-done.returncode}"
                if done.returncode < 0
                else f"failed with status {done.returncode}"
            )
            raise JobError(f"{function} {how}:\n{done.stderr[-4000:]}")
        return json.load(result)


def _main(function: str, arguments: str, result_path: str) -> None:
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    with open(result_path, "w") as result_file:
        json.dump(result, result_file)


if __name__ == "__main__":
    _main(*sys.argv[1:])
