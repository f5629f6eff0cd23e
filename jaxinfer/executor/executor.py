"""The device side of an engine: weights, KV cache and programs on the mesh of this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.plan import StepHandle, StepPlan, TokenMask
from jaxinfer.executor import kv_cache
from jaxinfer.executor.buckets import BucketLadder
from jaxinfer.executor.input_batch import InputBatch
from jaxinfer.executor.model_runner import ModelRunner
from jaxinfer.executor.program_cache import CompileGuard, ProgramCache, use_persistent_cache
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.sampler_state import SamplerState, sampler_state_nbytes
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import make_mesh, replicated

logger = logging.getLogger(__name__)

LoadLeaves = Callable[[FunctionalDecoder], list[jax.Array]]
"""Fills a decoder's leaves, each on its devices under its sharding, in the decoder's order."""


class MeshExecutor:
    """An `engine.plan.Executor` over the devices of one process.

    `num_compilations` counts what was compiled since start-up ended: after a full warm-up it stays 0.
    """

    def __init__(self, config: EngineConfig, spec: DecoderSpec, load: LoadLeaves):
        start = time.perf_counter()
        use_persistent_cache(config.compilation.cache_dir)
        self._guard = CompileGuard()
        mesh = make_mesh(config.parallel.tensor_parallel_size)
        device = mesh.devices.flat[0]
        device_bytes, in_use = kv_cache.device_memory(device)
        decoder = FunctionalDecoder.create(spec, mesh, config.model.dtype)
        leaves = load(decoder)
        loaded = time.perf_counter()

        limits = config.scheduler
        ladder = BucketLadder.create(
            limits.max_num_batched_tokens, limits.max_num_seqs, config.max_blocks_per_seq
        )
        self._cache = ProgramCache(num_threads=2)

        def programs(num_blocks: int) -> Programs:
            return Programs(
                decoder=decoder,
                ladder=ladder,
                cache=self._cache,
                sampler_state=SamplerState(limits.max_num_seqs, spec.vocab_size, replicated(mesh)),
                num_rows=limits.max_num_seqs,
                num_blocks=num_blocks,
                block_size=config.cache.block_size,
                max_logprobs=config.model.max_logprobs,
            )

        block_bytes = sum(
            _device_bytes(pages)
            for layer in decoder.kv_cache_shapes(1, config.cache.block_size)
            for pages in layer
        )
        resident = (
            in_use
            + sum(map(_device_bytes, leaves))
            + sampler_state_nbytes(limits.max_num_seqs, spec.vocab_size)
        )
        temp_bytes = 0
        if config.device == "gpu" and _sized_by_utilization(config):
            temp_bytes = _largest_temporaries(programs(config.max_blocks_per_seq + 1))
        self._num_blocks = kv_cache.num_blocks(
            config,
            block_bytes,
            device_bytes=device_bytes,
            resident_bytes=resident,
            temp_bytes=temp_bytes,
        )
        shapes = decoder.kv_cache_shapes(max(self._num_blocks, 1), config.cache.block_size)
        self.runner = ModelRunner(
            programs=programs(self._num_blocks),
            leaves=leaves,
            kv_cache=kv_cache.allocate(shapes),
            last_tokens=jax.device_put(
                np.zeros(limits.max_num_seqs + 1, np.int32), replicated(mesh)
            ),
            batch=InputBatch(
                limits.max_num_seqs, config.max_blocks_per_seq, config.cache.block_size, ladder
            ),
            sampling_rows=SamplingRows(
                limits.max_num_seqs,
                spec.vocab_size,
                seed=config.model.seed,
                max_logprobs=config.model.max_logprobs,
            ),
        )
        logger.info(
            "weights %.2f GiB in %.1f s; KV cache %d blocks of %d tokens (%.2f GiB)",
            sum(map(_device_bytes, leaves)) / 2**30,
            loaded - start,
            self._num_blocks,
            config.cache.block_size,
            self._num_blocks * block_bytes / 2**30,
        )
        if config.compilation.warmup == "all":
            self.runner.warm_up(_log_progress)
        self._guard.reset()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_compilations(self) -> int:
        return self._guard.count

    def reset_num_compilations(self) -> None:
        """Count from here: a lazily compiled engine has seen the shapes it will meet."""
        self._guard.reset()

    def execute_model(self, plan: StepPlan) -> None:
        self.runner.execute_model(plan)

    def sample_tokens(self, mask: TokenMask | None) -> StepHandle:
        return self.runner.sample_tokens(mask)

    def shutdown(self) -> None:
        self._cache.shutdown()


def _device_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of `array` on one of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize


def _sized_by_utilization(config: EngineConfig) -> bool:
    return config.cache.num_gpu_blocks_override is None and (
        config.cache.kv_cache_memory_bytes is None
    )


def _largest_temporaries(programs: Programs) -> int:
    """Temporary bytes of the largest step, as XLA laid them out; they don't depend on the number of blocks."""
    largest = next(programs.ladder.all_shapes())
    compiled = programs.lower_forward(largest).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _log_progress(done: int, total: int) -> None:
    logger.info("compiled %d of %d programs", done, total)
