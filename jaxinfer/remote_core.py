"""Engines whose cores run in processes of their own: this one never imports JAX."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jaxinfer.config import HEARTBEAT_TIMEOUT, DataParallelRouting, EngineConfig
from jaxinfer.engine.core_group import CoreGroup
from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.ipc import Ready
from jaxinfer.engine.load_balancer import LoadBalancer
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import (
    GPU_DRIVERS,
    EngineFrontend,
    build_frontend,
    load_tokenizer,
    model_files,
)
from jaxinfer.logits_processors import check_importable
from jaxinfer.weights.resolve import open_checkpoint

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class CoreStarter:
    """Starts `args.data_parallel_size` engine cores by `command` (see `core_command`), each on devices of its own."""

    args: EngineArgs
    command: Sequence[str]
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT

    def start(self, core: int) -> CoreProcess:
        """Raises `ValueError` where there are too few devices."""
        num_cores = self.args.data_parallel_size
        return CoreProcess(
            self.command,
            replace(self.args, data_parallel_rank=self.args.data_parallel_rank + core),
            self.heartbeat_timeout,
            core_environment(core, num_cores, self.args.tensor_parallel_size),
            "The engine core's process" if num_cores == 1 else f"Engine core {core}'s process",
        )

    def start_all(self) -> list[CoreProcess]:
        started: list[CoreProcess] = []
        try:
            for core in range(self.args.data_parallel_size):
                started.append(self.start(core))
        except BaseException:
            end(started)
            raise
        return started


def wait_ready(processes: Sequence[CoreProcess]) -> list[Ready]:
    """Of all of them. Raises as `CoreProcess.wait_ready`."""
    return [process.wait_ready() for process in processes]


def end(processes: Sequence[CoreProcess]) -> None:
    """Without waiting for anything."""
    for process in processes:
        process.kill()
        process.close()


@dataclass(slots=True)
class RemoteEngine:
    """`frontend` and `connect` are what `AsyncLLM.from_client` takes; `cores` is there once it has connected."""

    frontend: EngineFrontend
    processes: list[CoreProcess]
    ready: list[Ready]
    routing: DataParallelRouting = "load"
    cores: CoreGroup | None = None

    @property
    def num_blocks(self) -> list[int | None]:
        return [ready.num_blocks for ready in self.ready]

    def connect(self, on_outputs: Callable[[EngineCoreOutputs], None]) -> CoreGroup:
        connects = [
            partial(ProcessClient, process, ready)
            for process, ready in zip(self.processes, self.ready, strict=True)
        ]
        self.cores = CoreGroup(
            connects, load_balancer(self.frontend.config, self.routing), on_outputs
        )
        return self.cores


def load_balancer(config: EngineConfig, routing: DataParallelRouting) -> LoadBalancer:
    return LoadBalancer(routing, config.cache.block_size, config.scheduler.max_num_seqs)


def core_command(log_level: str) -> list[str]:
    return [sys.executable, "-m", "jaxinfer.core_main", log_level]


def start_remote_engine(
    starter: CoreStarter, routing: DataParallelRouting = "load"
) -> RemoteEngine:
    """Start the cores and load the tokenizer beside them; returns when all are ready.

    Raises as `build_engine`, `ValueError` where there are too few devices, and `EngineDeadError` when a process ends in
    any other way.
    """
    args = starter.args
    check_importable(args.logits_processors)
    files = model_files(args)
    processes = starter.start_all()
    try:
        tokenizer = load_tokenizer(args, files)
        ready = wait_ready(processes)
        frontend = build_frontend(args, ready[0].config, tokenizer, open_checkpoint(files))
    except BaseException:
        end(processes)
        raise
    return RemoteEngine(frontend, processes, ready, routing)


def core_environment(core: int, num_cores: int, tensor_parallel_size: int) -> dict[str, str]:
    """What a core's process finds in its environment: on a machine with GPUs, `tensor_parallel_size` of those that are
    visible here, others than the other cores'. On CPUs, each process makes its own devices."""
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    has_gpus = any(map(os.path.exists, GPU_DRIVERS))
    if num_cores == 1 or not has_gpus or not {"cuda", "gpu"} & set(platforms.split(",")):
        return {}
    visible = _visible_gpus()
    needed = num_cores * tensor_parallel_size
    if len(visible) < needed:
        raise ValueError(
            f"data_parallel_size is {num_cores}: with tensor_parallel_size {tensor_parallel_size}, that takes {needed} "
            f"GPUs, and there are {len(visible)}."
        )
    first = core * tensor_parallel_size
    return {_VISIBLE: ",".join(visible[first : first + tensor_parallel_size])}


def _visible_gpus() -> list[str]:
    if (chosen := os.environ.get(_VISIBLE)) is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
