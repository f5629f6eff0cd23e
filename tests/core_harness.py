"""An engine core over a tiny checkpoint, driven with token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.messages import EngineCoreRequest, FinishedRequest, TokenLogprobs
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import draft_checkpoint
from jaxinfer.executor.build import build_executor
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.models.registry import describe_model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.resolve import open_checkpoint, resolve_model
from tests.tiny_checkpoints import tiny_checkpoint


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: FinishedRequest | None = None


@contextmanager
def tiny_core(checkpoint: str | Path = "llama", **args) -> Iterator[EngineCore]:
    """A core over the directory, or the `tiny_checkpoint`, with these `EngineArgs`; small defaults."""
    defaults = dict(
        max_model_len=96,
        block_size=4,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=600,
    )
    model_path = checkpoint if isinstance(checkpoint, Path) else tiny_checkpoint(checkpoint)
    engine_args = EngineArgs(model=str(model_path), **(defaults | args))
    reader = open_checkpoint(resolve_model(engine_args.model))
    model = describe_model(reader.config() | engine_args.hf_overrides, engine_args.max_model_len)
    config = engine_args.create_engine_config(model, "cpu")
    drafter = draft_checkpoint(engine_args, config)
    core = EngineCore(config, build_executor(config, model, reader, None, drafter))
    try:
        yield core
    finally:
        core.shutdown()


def executor_of(core: EngineCore) -> MeshExecutor:
    return core._executor  # type: ignore[return-value]


def run(
    core: EngineCore,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    max_steps: int = 2000,
    stats: list[SchedulerStats] | None = None,
) -> list[Generated]:
    """Generate for all prompts at once, to the end; each step's scheduler stats go to `stats`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    results = {str(i): Generated() for i in range(len(prompts))}
    for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        core.add_request(EngineCoreRequest(str(i), list(prompt), p, arrival_time=time.monotonic()))
    for _ in range(max_steps):
        if not core.has_unfinished():
            break
        outputs = core.step()
        if stats is not None and outputs.stats is not None:
            stats.append(outputs.stats)
        counts = outputs.num_tokens or [1] * len(outputs.request_ids)
        names = [
            n for n, count in zip(outputs.request_ids, counts, strict=True) for _ in range(count)
        ]
        for i, (name, token) in enumerate(zip(names, outputs.token_ids, strict=True)):
            results[name].token_ids.append(token)
            if i in outputs.logprobs:
                results[name].logprobs.append(outputs.logprobs[i])
        for name, scores in outputs.prompt_logprobs.items():
            results[name].prompt_logprobs += scores
        for finished in outputs.finished:
            results[finished.request_id].finished = finished
    assert not core.has_unfinished(), "requests are left over"
    return list(results.values())
