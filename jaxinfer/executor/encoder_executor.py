"""The device side of an engine whose model is an encoder: whole prompts, no KV cache.

The scheduler is the decoders'. A prompt that it hands out in chunks is computed with the last of them, and one block holds
a whole prompt, so that blocks never run out before rows do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import PoolingTask
from jaxinfer.engine.plan import SLEEP_TAGS, AdmittedRow, StepPlan, StepResult, TokenMask
from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.executor import accounting
from jaxinfer.executor.encoder_programs import EncoderPrograms, pack_texts
from jaxinfer.executor.length_batches import LengthBatches
from jaxinfer.executor.program_cache import CompileGuard, ProgramCache, use_persistent_cache
from jaxinfer.executor.resident import Resident
from jaxinfer.models.encoders.encoder import Encoder
from jaxinfer.models.encoders.registry import EncoderDescription
from jaxinfer.models.functional import FlatModule
from jaxinfer.parallel.mesh import device_bytes, make_mesh, replicated
from jaxinfer.weights.dummy import dummy_leaves
from jaxinfer.weights.loader import load_leaves
from jaxinfer.weights.reader import CheckpointReader

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
"""Batches that a CPU computes at once, at most."""


@dataclass(frozen=True, slots=True)
class LaunchedTexts:
    """Results on their way: of each batch what waits for its array, the plan's rows that it is about, and their lengths."""

    num_rows: int
    batches: list[tuple[Callable[[], np.ndarray], np.ndarray, np.ndarray, PoolingTask]]

    def result(self) -> StepResult:
        pooled: dict[int, np.ndarray] = {}
        invalid = np.zeros(self.num_rows, np.bool_)
        for wait, positions, lengths, task in self.batches:
            values = wait()
            for i, (position, length) in enumerate(
                zip(positions.tolist(), lengths.tolist(), strict=True)
            ):
                of_text = values[i, :length] if task.startswith("token_") else values[i]
                invalid[position] = not np.isfinite(of_text).all()
                pooled[position] = of_text
        return StepResult(np.zeros(self.num_rows, np.int32), invalid, pooled=pooled)


@dataclass
class _Weights:
    """An `executor.resident.Owner`."""

    leaves: list[jax.Array]
    kv_cache: tuple[tuple[jax.Array, ...], ...] = ()


class EncoderExecutor:
    """An `engine.plan.Executor`, on one device."""

    def __init__(
        self, config: EngineConfig, model: EncoderDescription, reader: CheckpointReader
    ) -> None:
        assert config.pooler is not None
        if config.parallel.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size must be 1 for an encoder, got {config.parallel.tensor_parallel_size}."
            )
        use_persistent_cache(config.compilation.cache_dir)
        self.on_compile: Callable[[], None] | None = None
        self._guard = CompileGuard()
        cache = ProgramCache(num_threads=2)
        cache.on_wait = lambda: self.on_compile and self.on_compile()
        self._cache, self._config, self._model, self._reader = cache, config, model, reader
        mesh = self._mesh = make_mesh(1)
        module = FlatModule.create(lambda: Encoder(model.spec, jnp.dtype(config.model.dtype)), mesh)
        self._programs = EncoderPrograms(module, mesh, cache, config.pooler.pooling_type)
        self._batches = LengthBatches.create(
            config.model.max_model_len, config.scheduler.max_num_seqs, config.device
        )
        start = time.perf_counter()
        self._weights = _Weights(self._load())
        logger.info(
            "weights: %.2f GiB in %.1f s",
            sum(map(device_bytes, self._weights.leaves)) / 2**30,
            time.perf_counter() - start,
        )
        if config.compilation.warmup == "all":
            tasks: list[PoolingTask] = [config.pooler.tasks[0]]  # type: ignore[list-item]
            self._programs.warm_up(self._batches.all_shapes(), tasks, _log_progress)
        self._guard.reset()
        self._resident = Resident(self._weights, module.leaves.values(), (), self._load)
        self._asleep: set[str] = set()
        self._rows: dict[int, AdmittedRow] = {}
        self._workers: ThreadPoolExecutor | None = None
        if config.device == "cpu":
            # A bfloat16 product of these sizes is one core's work: batches side by side give the others some.
            num_workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
            self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="encoder")
        self._launched = LaunchedTexts(0, [])

    def _load(self) -> list[jax.Array]:
        shapes = self._programs.module.leaves
        if self._config.load.load_format == "dummy":
            leaves = dummy_leaves(shapes, self._config.model.seed)
        else:
            leaves = load_leaves(
                self._reader,
                self._model.checkpoint_plan(self._reader.names()),
                shapes,
                ignored=self._model.ignored_tensors,
            )
        return [leaves[path] for path in shapes]

    @property
    def num_blocks(self) -> int:
        return self._config.scheduler.max_num_seqs + 1

    @property
    def num_compilations(self) -> int:
        return self._guard.count

    def reset_num_compilations(self) -> None:
        """Count from here."""
        self._guard.reset()

    @property
    def step_costs(self) -> StepCosts:
        return accounting.encoder_costs(
            self._model.spec, self._programs.module, self._mesh.devices.flat[0]
        )

    def device_memory(self) -> DeviceMemory:
        return accounting.device_memory(self._mesh.local_devices[0])

    def execute_model(self, plan: StepPlan) -> None:
        """Launch the prompts that end with this step, like lengths together."""
        for admitted in plan.admitted:
            self._rows[admitted.row] = admitted
        due = np.flatnonzero(plan.samples)
        texts = [self._rows[row] for row in plan.rows[due].tolist()]
        by_task: dict[PoolingTask, list[int]] = {}
        for i, text in enumerate(texts):
            assert text.pooling is not None
            by_task.setdefault(text.pooling.task, []).append(i)
        self._launched = LaunchedTexts(len(plan.rows), [])
        for task, members in by_task.items():
            lengths = np.array([texts[i].num_prompt_tokens for i in members], np.int32)
            for shape, chosen in self._batches.split(lengths):
                batch = [texts[members[i]] for i in chosen.tolist()]
                packed = pack_texts(
                    shape,
                    [text.token_ids[: text.num_prompt_tokens] for text in batch],
                    [text.pooling and text.pooling.second_text for text in batch],
                )
                wait = self._launch(self._programs.run(shape, task), packed)
                positions = due[np.array(members)[chosen]]
                self._launched.batches.append((wait, positions, lengths[chosen], task))

    def _launch(self, program: jax.stages.Compiled, packed: np.ndarray) -> Callable[[], np.ndarray]:
        """Returns what waits for the result."""

        def run() -> jax.Array:
            return program(self._weights.leaves, jax.device_put(packed, replicated(self._mesh)))

        if self._workers is not None:
            return self._workers.submit(lambda: np.asarray(run())).result
        array = run()
        array.copy_to_host_async()
        return lambda: np.asarray(array)

    def sample_tokens(self, mask: TokenMask | None) -> LaunchedTexts:
        return self._launched

    @property
    def asleep(self) -> set[str]:
        return self._asleep

    def sleep(self, level: int) -> None:
        if "weights" not in self._asleep:
            self._resident.drop_weights(keep=level == 1)
        self._asleep = set(SLEEP_TAGS)

    def wake_up(self, tags: Collection[str]) -> None:
        if "weights" in self._asleep & set(tags):
            self._resident.restore_weights()
        self._asleep -= set(tags)

    def shutdown(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
        self._cache.shutdown()


def _log_progress(done: int, total: int) -> None:
    logger.info("compiled %d of %d programs", done, total)
