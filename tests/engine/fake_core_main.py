"""A process that serves the fake device's core, run as `python fake_core_main.py NEXT_TOKEN INBOX OUTBOX`.

NEXT_TOKEN: "hash", "story" (what `tests.frontend.story_engine` tells), "slow" (the same, 5 ms a step), "compile" (each
step waits 1 s for a program), or what goes wrong: "refuse" (bad input while building), "fail" (any other error while
building), "break" (a step fails), "hang" (a step never ends), "exit" (the process exits while building).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxinfer.config import LoRAConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.core_process import run_core
from jaxinfer.engine_args import EngineArgs
from tests.engine.fake_executor import FakeExecutor
from tests.engine.fake_requests import hashed_token, make_config


def build(kind: str, args: EngineArgs) -> EngineCore:
    if kind == "refuse":
        raise ValueError(f"model: there is no {args.model}.")
    if kind == "fail":
        raise RuntimeError("no device")
    if kind == "exit":
        os._exit(7)
    lora = None
    if args.enable_lora:
        num_host = args.max_cpu_loras or args.max_loras
        lora = LoRAConfig(args.max_loras, args.max_lora_rank, num_host, "float32")
    config = make_config(
        max_model_len=args.max_model_len or 32,
        max_num_seqs=args.max_num_seqs or 4,
        budget=32,
        lora=lora,
    )
    executor = FakeExecutor(config, 400)
    executor.folders = _Files()
    executor.next_token = _next_token(kind, executor)
    return EngineCore(config, executor)


class _Files(dict[str, str]):
    """The content of an adapter is that of the file that its path names."""

    def __contains__(self, path: object) -> bool:
        return Path(str(path)).is_file()

    def __getitem__(self, path: str) -> str:
        return Path(path).read_text()


def _next_token(kind: str, executor: FakeExecutor):
    if kind == "hash":
        return hashed_token
    if kind == "break":
        return lambda context: 1 // 0
    if kind == "hang":
        return lambda context: threading.Event().wait()
    if kind == "compile":

        def compile_first(context: Sequence[int]) -> int:
            executor.on_compile()
            time.sleep(1)
            return hashed_token(context)

        return compile_first
    from tests.frontend.story_engine import tell

    def tell_slowly(context: Sequence[int]) -> int:
        time.sleep(0.005)
        return tell(context)

    return tell_slowly if kind == "slow" else tell


if __name__ == "__main__":
    kind, inbox, outbox = sys.argv[1:]
    sys.exit(run_core(inbox, outbox, lambda args: build(kind, args)))
