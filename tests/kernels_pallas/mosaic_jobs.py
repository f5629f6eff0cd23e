"""Calls of interpreted Mosaic GPU kernels, each in a process of its own: a wrong kernel may hang or abort.

The processes are forks of one that has imported JAX and started no backend, as that takes as long as a kernel's run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

STUCK = "no progress"
"""What a process says when it ends itself because its kernel waits for what never comes."""


def outcomes(
    calls: dict[str, tuple[str, dict[str, Any]]], limit: int, workers: int = 2
) -> dict[str, dict[str, Any]]:
    """{"result": what it returned} or {"error": what it said last} of each call of (`module:function`, arguments).

    `limit` is in seconds, for each call.
    """
    tasks = len(os.listdir("/proc/self/task"))
    assert tasks == 1, f"a fork would leave {tasks - 1} threads behind"
    waiting, running, found = list(calls.items()), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                name, (function, arguments) = waiting.pop(0)
                files = Path(folder) / str(len(waiting))
                running[_start(function, arguments, files, limit)] = name, files
            pid, status = os.wait()
            name, files = running.pop(pid)
            if status == 0:
                found[name] = {"result": json.loads(files.with_suffix(".json").read_text())}
                continue
            said = files.with_suffix(".log").read_text(errors="replace")[-4000:]
            if os.WIFSIGNALED(status):
                died = os.WTERMSIG(status)
                said += (
                    f"took longer than {limit} s" if died == signal.SIGALRM else f"signal {died}"
                )
            found[name] = {"error": said}
    return found


def _start(function: str, arguments: dict[str, Any], files: Path, limit: int) -> int:
    """The new process's id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.alarm(limit)
        log = os.open(files.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(**arguments)
        files.with_suffix(".json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Threads of a kernel that failed may wait for ever.
        os._exit(status)


def with_fault(
    function: str, arguments: dict[str, Any], module: str, edits: list[tuple[str, str]]
) -> Any:
    """The call, with text of a module replaced that nothing has imported yet: each edit's old text must occur in it.

    Ends with `STUCK` on stderr when the kernel waits for what never comes.
    """
    threading.Thread(target=_end_when_stuck, daemon=True).start()
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text()
    for old, new in edits:
        if old not in source:
            raise LookupError(f"{module} has no {old!r}")
        source = source.replace(old, new)
    assert module not in sys.modules, f"{module} was imported before the fault was planted"
    faulty = sys.modules[module] = importlib.util.module_from_spec(spec)
    exec(compile(source, spec.origin, "exec"), faulty.__dict__)
    package, _, name = module.rpartition(".")
    setattr(sys.modules[package], name, faulty)
    of, _, name = function.partition(":")
    return getattr(importlib.import_module(of), name)(**arguments)


def _end_when_stuck(interval: float = 5.0) -> None:
    """Threads that wait for a barrier use no CPU time; anything else does, however busy the machine is."""
    idle = 0
    while idle < 2:
        before = time.process_time()
        time.sleep(interval)
        idle = idle + 1 if time.process_time() - before < 0.02 else 0
    print(STUCK, file=sys.stderr, flush=True)
    os._exit(3)


def interpret_params() -> Any:
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)


def races_found() -> bool:
    """In the last kernel that ran: JAX 0.11 notes a race, 0.12 raises on it."""
    return bool(gpu_callbacks.get_races().races_found)
