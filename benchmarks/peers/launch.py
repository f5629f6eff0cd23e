"""Starts an engine's worker in its own environment and speaks to it (see worker.py for the protocol)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKERS = {
    "jaxinfer": "jaxinfer_worker.py",
    "vllm": "vllm_worker.py",
    "transformers": "transformers_worker.py",
    "llamacpp": "llamacpp_worker.py",
    "openvino": "openvino_worker.py",
}


class WorkerError(RuntimeError):
    """A worker ended or said something that is not the protocol; its own output is on stderr."""


def vllm_preload(python: Path) -> str:
    """LD_PRELOAD for vLLM on CPU. Raises `WorkerError` when tcmalloc or the venv's libiomp5 is missing."""
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    tcmalloc = re.search(r"libtcmalloc_minimal\.so\.4 .*=> (\S+)", listing)
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if tcmalloc is None or not openmp.exists():
        raise WorkerError(
            f"vLLM on CPU wants libtcmalloc_minimal.so.4 (package libtcmalloc-minimal4) and {openmp}."
        )
    return f"{tcmalloc.group(1)}:{openmp}"


class Worker:
    """A running engine. `start` blocks until the engine has answered its first request."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        hello = self._receive()
        self.version: str = hello["version"]
        self.settings: str = hello["settings"]
        self.startup_s: float = hello["startup_s"]

    @classmethod
    def start(cls, name: str, python: str, arguments: list[str], threads: int) -> Worker:
        environment = dict(os.environ, HF_HUB_OFFLINE="1")
        environment.pop("PYTHONPATH", None)
        if name != "jaxinfer":
            environment["OMP_NUM_THREADS"] = str(threads)
        if name == "vllm":
            environment["LD_PRELOAD"] = vllm_preload(Path(python).absolute())
        command = [python, str(HERE / WORKERS[name]), *arguments, "--threads", str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return cls(name, process)

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"the {self.name} worker ended with status {self.process.wait()}.")
        return json.loads(line)

    def _call(self, **request: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def reset(self) -> None:
        self._call(op="reset")

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """`wall_s`, `outputs` (checked for number and length) and the engine's `counters`."""
        answer = self._call(op="generate", prompts=prompts, max_tokens=max_tokens)
        lengths = [len(output) for output in answer["outputs"]]
        if lengths != [max_tokens] * len(prompts):
            raise WorkerError(f"{self.name}: asked for {max_tokens} tokens each, got {lengths}.")
        return answer

    def close(self) -> None:
        """End of input ends the worker; one that hangs is killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_worker(name: str, python: str | None, arguments: list[str], threads: int) -> Worker:
    print(f"starting {name} ...", file=sys.stderr, flush=True)
    worker = Worker.start(name, python or sys.executable, arguments, threads)
    print(f"  ready after {worker.startup_s:.1f} s", file=sys.stderr, flush=True)
    return worker
