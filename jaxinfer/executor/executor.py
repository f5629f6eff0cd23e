"""The device side of an engine: weights, KV cache and programs on the mesh of this process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.plan import SLEEP_TAGS, StepHandle, StepPlan, TokenMask
from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.executor import accounting, kv_cache
from jaxinfer.executor.adapters import DeviceAdapters, MakeAdapters
from jaxinfer.executor.buckets import BucketLadder
from jaxinfer.executor.cache_size import num_blocks_for
from jaxinfer.executor.deterministic_programs import TILE_TOKENS, DeterministicPrograms
from jaxinfer.executor.deterministic_runner import DeterministicRunner
from jaxinfer.executor.input_batch import InputBatch
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.executor.model_runner import ModelRunner
from jaxinfer.executor.pooling_programs import ClassHead, PoolingPrograms
from jaxinfer.executor.pooling_runner import PoolingRunner
from jaxinfer.executor.program_cache import CompileGuard, ProgramCache, use_persistent_cache
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.resident import Resident
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.executor.speculative.draft_choice import DraftChoice
from jaxinfer.executor.speculative.drafting import Drafting
from jaxinfer.executor.speculative.model_drafter import (
    DrafterSetting,
    MakeDrafter,
    ModelDrafter,
)
from jaxinfer.logits_processors import LogitsProcessor
from jaxinfer.models.cache_groups import CacheGroups, model_groups
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import device_bytes, make_mesh, replicated
from kernels_pallas.quantized_pages import quantized

logger = logging.getLogger(__name__)

CHECK_BATCHES = "JAXINFER_CHECK_BATCHES"
"""Environment variable: 1 checks every step's block tables and lengths on the host, to find a fault in the engine."""

LoadLeaves = Callable[[FunctionalDecoder], list[jax.Array]]
"""Fills a decoder's leaves, each on its devices under its sharding, in the decoder's order."""

StoreLeaves = Callable[[FunctionalDecoder], FunctionalDecoder]


class MeshExecutor:
    """An `engine.plan.Executor` over the devices of one process.

    `num_compilations` counts what was compiled since start-up ended: after a full warm-up it stays 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: DecoderSpec,
        load: LoadLeaves,
        processors: Mapping[str, LogitsProcessor] | None = None,
        make_drafter: MakeDrafter | None = None,
        make_adapters: MakeAdapters | None = None,
        store: StoreLeaves | None = None,
        class_head: ClassHead = (),
    ) -> None:
        """`store` says which leaves are kept as the checkpoint has them."""
        _check_attention(config, spec)
        compiled_in = LogitsProcessors(processors, spec.vocab_size) if processors else None
        use_persistent_cache(config.compilation.cache_dir)
        self._guard = CompileGuard()
        self._cache = ProgramCache(num_threads=2)
        mesh = make_mesh(config.parallel.tensor_parallel_size)
        memory = kv_cache.device_memory(mesh.devices.flat[0])
        kv_dtype = config.cache.dtype
        if (config.device, kv_dtype) == ("cpu", "float8_e4m3fn"):
            kv_dtype = "uint8"  # its bits: see kernels_pallas.quantized_pages
        decoder = FunctionalDecoder.create(
            spec,
            mesh,
            config.model.dtype,
            kv_dtype,
            _cache_groups(config, spec),
            expert_parallel=config.parallel.expert_parallel,
        )
        if store is not None:
            decoder = store(decoder)
        ladder = _ladder(config, spec)
        drafter = None
        if make_drafter is not None:
            drafter = make_drafter(decoder, _drafter_setting(config, decoder, ladder, self._cache))
        adapters = None if make_adapters is None else make_adapters(decoder, self._cache)
        start = time.perf_counter()
        leaves = load(decoder)
        if drafter is not None:
            drafter.leaves = drafter.load()
        logger.info(
            "weights: %.2f GiB per device in %.1f s",
            sum(map(device_bytes, [*leaves, *(drafter.leaves if drafter else [])])) / 2**30,
            time.perf_counter() - start,
        )
        programs_class = DeterministicPrograms if config.deterministic else Programs
        if config.pooler is not None:
            programs_class = partial(
                PoolingPrograms,
                pooling_type=config.pooler.pooling_type,
                class_head=tuple(map(_shape_of, class_head)),
            )
        programs = programs_class(
            decoder=decoder,
            ladder=ladder,
            cache=self._cache,
            sampler_state=SamplerState(
                config.scheduler.max_num_seqs, spec.vocab_size, replicated(mesh)
            ),
            num_rows=config.scheduler.max_num_seqs,
            num_blocks=config.max_blocks_per_seq + 1,
            block_size=config.cache.block_size,
            max_logprobs=config.model.max_logprobs,
            logprobs_mode=config.model.logprobs_mode,
            processors=compiled_in,
            num_drafts=config.speculative.num_speculative_tokens if config.speculative else 0,
            draws_drafts=drafter is not None and drafter.setting.choice.random,
            stream_layers=drafter.aux_layers if drafter else (),
            adapters=adapters and adapters.shapes,
        )
        num_blocks = num_blocks_for(config, programs, leaves, drafter, memory)
        programs = replace(programs, num_blocks=num_blocks)
        self.runner = _create_runner(config, programs, leaves, drafter, adapters, class_head)
        if config.compilation.warmup == "all":
            self.runner.warm_up(_log_progress)
        self._guard.reset()
        self._step_costs = accounting.step_costs(decoder)
        self._asleep: set[str] = set()
        cache_shapes = programs.kv_cache_shapes()
        self._residents = [
            Resident(self.runner, decoder.leaves.values(), cache_shapes, partial(load, decoder))
        ]
        if drafter is not None:
            cache_shapes = drafter.kv_cache_shapes(num_blocks)
            shapes = drafter.module.leaves.values()
            self._residents.append(Resident(drafter, shapes, cache_shapes, drafter.load))

    @property
    def on_compile(self) -> Callable[[], None] | None:
        return self._cache.on_wait

    @on_compile.setter
    def on_compile(self, callback: Callable[[], None] | None) -> None:
        self._cache.on_wait = callback

    @property
    def num_blocks(self) -> int:
        return self.runner.programs.num_blocks

    @property
    def num_compilations(self) -> int:
        return self._guard.count

    def reset_num_compilations(self) -> None:
        """Count from here: a lazily compiled engine has seen the shapes it will meet."""
        self._guard.reset()

    @property
    def step_costs(self) -> StepCosts:
        return self._step_costs

    def device_memory(self) -> DeviceMemory:
        return accounting.device_memory(self.runner.programs.decoder.mesh.local_devices[0])

    def execute_model(self, plan: StepPlan) -> None:
        self.runner.execute_model(plan)

    def sample_tokens(self, mask: TokenMask | None) -> StepHandle:
        return self.runner.sample_tokens(mask)

    def read_adapter(self, path: str) -> str:
        assert self.runner.adapters is not None
        return self.runner.adapters.read(path)

    def drop_adapter(self, key: str) -> None:
        assert self.runner.adapters is not None
        self.runner.adapters.drop(key)

    @property
    def asleep(self) -> set[str]:
        return self._asleep

    def sleep(self, level: int) -> None:
        if self.runner.adapters is not None and "weights" not in self._asleep:
            self.runner.adapters.drop_stacks()
        for resident in self._residents:
            if "weights" not in self._asleep:
                resident.drop_weights(keep=level == 1)
            if "kv_cache" not in self._asleep:
                resident.drop_cache()
        self._asleep = set(SLEEP_TAGS)

    def wake_up(self, tags: Collection[str]) -> None:
        if self.runner.adapters is not None and "weights" in self._asleep & set(tags):
            self.runner.adapters.restore_stacks()
        for tag in sorted(self._asleep & set(tags), reverse=True):
            for resident in self._residents:
                if tag == "weights":
                    resident.restore_weights()
                else:
                    resident.restore_cache()
            self._asleep.discard(tag)

    def shutdown(self) -> None:
        self._cache.shutdown()


def _cache_groups(config: EngineConfig, spec: DecoderSpec) -> CacheGroups:
    groups = model_groups(spec, config.model.max_model_len)
    return (
        groups
        if groups.windows == config.cache.windows
        else CacheGroups.single(len(spec.attentions))
    )


def _seed(config: EngineConfig) -> int | list[int]:
    """Of those that bring none: others on every core."""
    seed, rank = config.model.seed, config.parallel.data_parallel_rank
    return [seed, rank] if rank else seed


def _check_attention(config: EngineConfig, spec: DecoderSpec) -> None:
    """Raises `ValueError` for options that latent attention doesn't have."""
    if not any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        return
    if config.cache.dtype is not None and quantized(jnp.dtype(config.cache.dtype)):
        raise ValueError(
            f"kv_cache_dtype {config.cache.dtype!r} is not supported for a cache of latents; "
            f"supported: 'auto'."
        )
    if config.deterministic:
        raise ValueError("deterministic=True is not supported for latent attention.")


def _ladder(config: EngineConfig, spec: DecoderSpec) -> BucketLadder:
    if config.deterministic:
        return BucketLadder.single(TILE_TOKENS[config.device], config.max_blocks_per_seq)
    return BucketLadder.create(
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_num_seqs,
        config.max_blocks_per_seq,
        _min_grouped_rows(config, spec),
        _max_drafts(config),
    )


def _min_grouped_rows(config: EngineConfig, spec: DecoderSpec) -> int | None:
    """From how many decoding rows on there are programs that attend to a shared beginning once. Layers with a window,
    ALiBi or latents always attend row by row, and where layers have states no beginnings are shared."""
    row_by_row = (
        isinstance(a, LatentAttentionSpec) or a.sliding_window or a.alibi_slopes
        for a in spec.attentions
    )
    if not config.cascade.enabled or spec.has_states or all(row_by_row):
        return None
    return config.cascade.min_rows


def _max_drafts(config: EngineConfig) -> int:
    """The most that a step verifies."""
    speculative, num_rows = config.speculative, config.scheduler.max_num_seqs
    if speculative is None:
        return 0
    return min(speculative.disable_by_batch_size, num_rows) * speculative.num_speculative_tokens


def _drafter_setting(
    config: EngineConfig, target: FunctionalDecoder, ladder: BucketLadder, cache: ProgramCache
) -> DrafterSetting:
    assert config.speculative is not None
    return DrafterSetting(
        mesh=target.mesh,
        ladder=ladder,
        cache=cache,
        num_rows=config.scheduler.max_num_seqs,
        block_size=config.cache.block_size,
        num_drafts=config.speculative.num_speculative_tokens,
        choice=DraftChoice(config.speculative.draft_sample_method == "probabilistic"),
        target_embed=target.embedding(list(target.leaves.values())),
    )


def _create_runner(
    config: EngineConfig,
    programs: Programs,
    leaves: list[jax.Array],
    drafter: ModelDrafter | None,
    adapters: DeviceAdapters | None,
    class_head: ClassHead,
) -> ModelRunner:
    num_rows, block_size = programs.num_rows, programs.block_size
    # Too few blocks are the engine core's to refuse: it knows what a request needs.
    num_blocks = max(programs.num_blocks, 1)
    shapes = programs.decoder.kv_cache_shapes(num_blocks, block_size, programs.num_slots)
    if drafter is not None:
        drafter.num_blocks = num_blocks
        drafter.kv_cache = kv_cache.allocate(drafter.kv_cache_shapes(num_blocks))
    runner_class = DeterministicRunner if config.deterministic else ModelRunner
    if config.pooler is not None:
        runner_class = partial(PoolingRunner, class_head=class_head)
    return runner_class(
        programs=programs,
        leaves=leaves,
        kv_cache=kv_cache.allocate(shapes),
        last_tokens=jax.device_put(
            np.zeros(num_rows + 1, np.int32), replicated(programs.decoder.mesh)
        ),
        batch=InputBatch(
            num_rows,
            config.max_blocks_per_seq,
            block_size,
            programs.ladder,
            programs.num_blocks if os.environ.get(CHECK_BATCHES) == "1" else None,
            len(programs.decoder.groups),
            adapters is not None,
        ),
        sampling_rows=SamplingRows(
            num_rows,
            programs.decoder.spec.vocab_size,
            seed=_seed(config),
            max_logprobs=config.model.max_logprobs,
            processors=programs.processors,
        ),
        drafting=None if drafter is None else Drafting(drafter, programs.decoder.spec.vocab_size),
        adapters=adapters,
    )


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _log_progress(done: int, total: int) -> None:
    logger.info("compiled %d of %d programs", done, total)
