"""What people type, flat and with vLLM's names, and the step from there to an `EngineConfig`.

That step needs the model's own limits, which the caller reads from the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from jaxinfer.config import (
    CASCADE_MIN_ROWS,
    CASCADE_MIN_TOKENS,
    JUMP_AHEAD_MAX_ROWS,
    MAX_LOGPROBS,
    MAX_OVERTAKES,
    CacheConfig,
    CascadeConfig,
    CompilationConfig,
    Device,
    EngineConfig,
    LoadConfig,
    LogprobsMode,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    PrefixCachingHashAlgo,
    SchedulerConfig,
    SchedulingPolicy,
    WarmupPolicy,
)
from jaxinfer.engine_limits import ModelLimits
from jaxinfer.logits_processors import LogitsProcessor, check_declared
from jaxinfer.pooler_config import Convert, PoolerConfig, Runner, check_given
from jaxinfer.speculative_config import SpeculativeConfig, speculative_config

logger = logging.getLogger(__name__)


_DTYPES = {
    "auto": None,
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}

QUANTIZATION_METHODS = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fp8",
    "gguf",
    "gptq",
    "mxfp4",
)
"""How checkpoints may be quantized."""

_KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Arguments of `LLM`, `AsyncLLM` and the command line, with vLLM's names and meanings."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    served_model_name: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    quantization: str | None = None
    dequantize: bool | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: dict[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"
    disable_hybrid_kv_cache_manager: bool = False
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    cache_aware_scheduling: bool = False
    max_cache_overtakes: int = MAX_OVERTAKES
    async_scheduling: bool = True
    grammar_jump_ahead: bool = True
    grammar_jump_ahead_max_rows: int | None = None
    disable_cascade_attn: bool = False
    cascade_min_rows: int = CASCADE_MIN_ROWS
    cascade_min_tokens: int | None = None
    speculative_config: dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    fully_sharded_loras: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_expert_parallel: bool = False
    warmup: WarmupPolicy = "lazy"
    compilation_cache_dir: str | None = None
    deterministic: bool = False
    runner: Runner = "auto"
    convert: Convert = "auto"
    pooler_config: dict[str, Any] | None = None
    override_pooler_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        def at_least(name: str, low: float) -> None:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < low):
                raise ValueError(f"{name} must be at least {low}, got {value}.")

        for name in ("max_model_len", "block_size", "num_gpu_blocks_override", "max_num_seqs"):
            at_least(name, 1)
        for name in ("max_num_batched_tokens", "kv_cache_memory_bytes", "tensor_parallel_size"):
            at_least(name, 1)
        for name in ("data_parallel_size", "max_loras", "max_lora_rank"):
            at_least(name, 1)
        at_least("max_cpu_loras", self.max_loras)
        at_least("cascade_min_rows", 2)
        at_least("cascade_min_tokens", 1)
        at_least("grammar_jump_ahead_max_rows", 1)
        for name in ("long_prefill_token_threshold", "max_cache_overtakes", "max_logprobs", "seed"):
            at_least(name, 0)
        at_least("data_parallel_rank", 0)
        check_declared(self.logits_processors)
        if self.pooler_config is not None and self.override_pooler_config is not None:
            raise ValueError("override_pooler_config is the old name of pooler_config; give one.")
        check_given(self.given_pooler)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}."
            )
        for name, known in (
            ("dtype", tuple(_DTYPES)),
            ("kv_cache_dtype", tuple(_KV_CACHE_DTYPES)),
            ("lora_dtype", tuple(_DTYPES)),
            ("fully_sharded_loras", (False,)),
            ("load_format", ("auto", "safetensors", "gguf", "orbax", "dummy")),
            ("quantization", (None, *QUANTIZATION_METHODS)),
            ("scheduling_policy", ("fcfs", "priority")),
            ("prefix_caching_hash_algo", ("sha256", "xxhash")),
            ("warmup", ("all", "lazy")),
            ("logprobs_mode", get_args(LogprobsMode)),
            ("runner", get_args(Runner)),
            ("convert", get_args(Convert)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}.")

    @property
    def given_pooler(self) -> dict[str, Any] | None:
        return self.pooler_config or self.override_pooler_config

    def create_engine_config(
        self,
        limits: ModelLimits,
        device: Device,
        processors: Mapping[str, LogitsProcessor] | None = None,
        pooler: PoolerConfig | None = None,
    ) -> EngineConfig:
        """Fill in every default from the model's limits and the device. `processors` are the `logits_processors`,
        resolved; `pooler` makes an engine for vectors.

        Raises `ValueError` when `max_model_len` exceeds what the model was trained for, or the step's token budget
        can't hold one token of each sequence.
        """
        max_model_len = self.max_model_len or limits.max_position_embeddings
        if max_model_len > limits.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the model's positions end at "
                f"{limits.max_position_embeddings}; use at most that."
            )
        # An encoder's prompts cost no memory while they wait, and of many there are more of like lengths.
        is_encoder = pooler is not None and pooler.is_encoder
        max_num_seqs = self.max_num_seqs or (256 if device == "gpu" or is_encoder else 64)
        budget = self.max_num_batched_tokens or max(
            8192 if device == "gpu" else 4096 if is_encoder else 1024, max_num_seqs
        )
        if budget < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({max_num_seqs})."
            )
        prefix_caching = self._prefix_caching(limits, pooler)
        if self.cache_aware_scheduling and not prefix_caching:
            raise ValueError("cache_aware_scheduling needs enable_prefix_caching, got False.")
        speculative = self._speculative(device)
        windows: tuple[int | None, ...] = (None,)
        # A drafter's layers have the blocks of the model's, and may look further back.
        if not (self.disable_hybrid_kv_cache_manager or (speculative and speculative.from_model)):
            windows = limits.cache_windows(max_model_len)
        # Where nothing is kept of single tokens, a block only says that a request runs.
        block_size = self.block_size or (64 if device == "gpu" else 16)
        if not limits.has_attention:
            block_size = max_model_len if is_encoder else self.block_size or max_model_len
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer or self.model,
                dtype=_DTYPES[self.dtype] or limits.checkpoint_dtype,
                max_model_len=max_model_len,
                vocab_size=limits.vocab_size,
                seed=self.seed,
                served_model_name=self.served_model_name,
                max_logprobs=self.max_logprobs,
                logprobs_mode=self.logprobs_mode,
                logits_processors={
                    name: dict(processor.parameters)  # type: ignore[arg-type]
                    for name, processor in (processors or {}).items()
                },
            ),
            load=LoadConfig(
                self.load_format,
                self.download_dir,
                self.revision,
                self.quantization,
                self.dequantize,
            ),
            cache=CacheConfig(
                block_size=block_size,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=prefix_caching,
                prefix_caching_hash_algo=self.prefix_caching_hash_algo,
                dtype=_KV_CACHE_DTYPES[self.kv_cache_dtype],
                windows=windows,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                policy=self.scheduling_policy,
                async_scheduling=self.async_scheduling,
                jump_ahead_max_rows=self._jump_ahead_max_rows(device),
                cache_aware=self.cache_aware_scheduling,
                max_overtakes=self.max_cache_overtakes,
            ),
            parallel=ParallelConfig(
                self.tensor_parallel_size, self.data_parallel_rank, self.enable_expert_parallel
            ),
            compilation=CompilationConfig(self.warmup, self.compilation_cache_dir),
            device=device,
            cascade=CascadeConfig(
                not (self.disable_cascade_attn or self.deterministic),
                self.cascade_min_rows,
                self.cascade_min_tokens or CASCADE_MIN_TOKENS[device],
            ),
            deterministic=self.deterministic,
            speculative=speculative,
            lora=self._lora(_DTYPES[self.dtype] or limits.checkpoint_dtype),
            pooler=pooler,
        )

    def _lora(self, dtype: str) -> LoRAConfig | None:
        """`dtype`: the model's."""
        if not self.enable_lora:
            return None
        if self.deterministic:
            raise ValueError("enable_lora can't be combined with deterministic=True.")
        return LoRAConfig(
            self.max_loras,
            self.max_lora_rank,
            self.max_cpu_loras or self.max_loras,
            _DTYPES[self.lora_dtype] or dtype,
        )

    def _prefix_caching(self, limits: ModelLimits, pooler: PoolerConfig | None) -> bool:
        """Also refuses what an engine for vectors has no use for, and what else needs to go back to an earlier token,
        where layers have states: these only know the last."""
        if pooler is not None:
            self._check_pooling(pooler)
        if pooler is not None and pooler.is_encoder:
            return False
        if not limits.has_states:
            return self.enable_prefix_caching is not False
        for name, value in (
            ("enable_prefix_caching", self.enable_prefix_caching),
            ("deterministic", self.deterministic),
            ("speculative_config", self.speculative_config),
        ):
            if value:
                raise ValueError(
                    f"{name}={value!r} can't be combined with this model: its layers keep states, which can't go back "
                    "to an earlier token."
                )
        logger.info("Prefix caching is off: the model's layers keep states.")
        return False

    def _check_pooling(self, pooler: PoolerConfig) -> None:
        for name, value in (
            ("speculative_config", self.speculative_config),
            ("deterministic", self.deterministic),
            ("logits_processors", self.logits_processors),
            ("enable_lora", self.enable_lora),
            ("enable_prefix_caching", pooler.is_encoder and self.enable_prefix_caching),
            ("quantization", pooler.is_encoder and self.quantization),
        ):
            if value:
                raise ValueError(
                    f"{name}={value!r} can't be combined with this model: it makes vectors"
                    f"{' of whole prompts' if pooler.is_encoder else ''}."
                )

    def _jump_ahead_max_rows(self, device: Device) -> int:
        if not self.grammar_jump_ahead:
            return 0
        return self.grammar_jump_ahead_max_rows or JUMP_AHEAD_MAX_ROWS[device]

    def _speculative(self, device: Device) -> SpeculativeConfig | None:
        given = self.speculative_config
        if given is not None and self.deterministic:
            raise ValueError("speculative_config can't be combined with deterministic=True.")
        return None if given is None else speculative_config(given, device)
