"""An engine whose core runs in a process of its own: this one never imports JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.config import HEARTBEAT_TIMEOUT, EngineArgs
from jaxinfer.engine.core_handle import CoreProcess
from jaxinfer.engine.ipc import Ready
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.engine.process_client import ProcessClient
from jaxinfer.engine_factory import (
    EngineFrontend,
    build_frontend,
    load_tokenizer,
    model_files,
)
from jaxinfer.logits_processors import check_importable
from jaxinfer.weights.resolve import open_checkpoint


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """`frontend` and `connect` are what `AsyncLLM.from_client` takes."""

    frontend: EngineFrontend
    process: CoreProcess
    ready: Ready

    @property
    def num_blocks(self) -> int:
        return self.ready.num_blocks

    def connect(self, on_outputs: Callable[[EngineCoreOutputs], None]) -> ProcessClient:
        return ProcessClient(self.process, self.ready, on_outputs)


def core_command(log_level: str) -> list[str]:
    return [sys.executable, "-m", "jaxinfer.core_main", log_level]


def start_remote_engine(
    args: EngineArgs, command: Sequence[str], heartbeat_timeout: float = HEARTBEAT_TIMEOUT
) -> RemoteEngine:
    """Start `command` (see `core_command`) and load the tokenizer beside it; returns when the core is ready.

    Raises as `build_engine`, and `EngineDeadError` when the process ends in any other way.
    """
    check_importable(args.logits_processors)
    files = model_files(args)
    process = CoreProcess(command, args, heartbeat_timeout)
    try:
        tokenizer = load_tokenizer(args, files)
        ready = process.wait_ready()
        frontend = build_frontend(args, ready.config, tokenizer, open_checkpoint(files))
    except BaseException:
        process.kill()
        process.close()
        raise
    return RemoteEngine(frontend, process, ready)
