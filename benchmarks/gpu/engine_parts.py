"""The engine's parts, where the benchmark can reach them, and what a step can't do without."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.cases import Context
from jaxinfer import LLM
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.plan import StepHandle, StepPlan, TokenMask
from jaxinfer.engine_args import EngineArgs
from jaxinfer.engine_factory import Engine, build_frontend, load_tokenizer, model_files
from jaxinfer.executor.build import build_executor
from jaxinfer.executor.executor import MeshExecutor
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.sampler_features import SamplerFeatures
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription, describe_model
from jaxinfer.weights.resolve import open_checkpoint


class Recording:
    """An executor that remembers the last plan that was launched."""

    def __init__(self, executor: MeshExecutor) -> None:
        self.inner = executor
        self.plan: StepPlan | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute_model(self, plan: StepPlan) -> None:
        self.plan = plan
        self.inner.execute_model(plan)

    def sample_tokens(self, mask: TokenMask | None) -> StepHandle:
        return self.inner.sample_tokens(mask)


@dataclass(frozen=True)
class Parts:
    llm: LLM
    core: EngineCore
    executor: Recording
    description: ModelDescription

    @property
    def vocab_size(self) -> int:
        return self.description.vocab_size

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.executor.runner.leaves)

    @property
    def _decoder(self) -> FunctionalDecoder:
        return self.executor.runner.programs.decoder

    @property
    def _read_bytes(self) -> int:
        """Of the weights that a step reads: all but the embedding, unless it is the head as well."""
        leaves = dict(zip(self._decoder.leaves, self.executor.runner.leaves, strict=True))
        if not self._decoder.spec.tied_head:
            del leaves["embed",]
        return sum(leaf.nbytes for leaf in leaves.values())

    @property
    def _kv_token_bytes(self) -> int:
        shapes = jax.tree.leaves(self._decoder.kv_cache_shapes(1, 1))
        return sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in shapes)

    def decode_floor(self, requests: int, context: int, run: Context) -> float:
        """Seconds: the weights and every request's keys and values read once, the new ones written."""
        kv = (requests * context + requests) * self._kv_token_bytes
        return (self._read_bytes + kv) / run.bandwidth

    def prefill_floor(self, tokens: int, prompt: int, run: Context) -> float:
        """Seconds: the matrix products of `tokens` tokens, attention within prompts of `prompt` tokens included."""
        spec = self._decoder.spec
        item = self._decoder.dtype.itemsize
        query_dims = 0
        for layer in spec.layers:
            heads = self._decoder.dims.heads(layer.attention)
            query_dims += heads.num_kv_heads * heads.queries_per_kv * layer.attention.head_dim
        attention = 4 * query_dims * (prompt + 1) / 2
        return tokens * (2 * self._read_bytes / item + attention) / run.matmul

    def device_step_seconds(self, count: int) -> float:
        """Of the last step, launched again and again without reading a token in between."""
        assert self.executor.plan is not None
        none = np.zeros(0, np.int32)
        plan = dataclasses.replace(
            self.executor.plan, admitted=[], block_rows=none, block_cols=none, block_ids=none
        )

        def launch() -> StepHandle:
            self.executor.inner.execute_model(plan)
            return self.executor.inner.sample_tokens(None)

        launch().result()
        begin = time.perf_counter()
        for _ in range(count):
            handle = launch()
        handle.result()
        return (time.perf_counter() - begin) / count


def describe(args: EngineArgs) -> tuple[ModelDescription, EngineConfig]:
    model = describe_model(open_checkpoint(model_files(args)).config(), args.max_model_len)
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    return model, args.create_engine_config(model, device)


def start_engine(model: str, arguments: dict[str, Any]) -> Parts:
    """As `jaxinfer.engine_factory` does, with an executor that records."""
    args = EngineArgs(model=model, **arguments)
    files = model_files(args)
    reader = open_checkpoint(files)
    description, config = describe(args)
    executor = Recording(build_executor(config, description, reader))
    core = EngineCore(config, executor)
    tokenizer = load_tokenizer(args, files)
    frontend = build_frontend(args, config, tokenizer, reader)
    engine = Engine(config, core, tokenizer, frontend.processor, frontend.token_text)
    return Parts(LLM.from_engine(engine), core, executor, description)


def compile_programs(programs: Programs, steps: Sequence[tuple[int, int]]) -> None:
    """What greedy steps of (tokens, rows) ask for, side by side."""
    longest = programs.ladder.pages[-1]
    shapes = {programs.ladder.shape(*step, longest) for step in steps}
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(programs.forward, shape) for shape in shapes]
        rows = {shape.num_rows for shape in shapes}
        jobs += [pool.submit(programs.sample, n, SamplerFeatures()) for n in rows]
        for job in jobs:
            job.result()
