"""What an engine reads: frozen dataclasses, resolved once from `EngineArgs`, never changed afterwards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.pooler_config import PoolerConfig
from jaxinfer.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)

Device = Literal["cpu", "gpu"]
SchedulingPolicy = Literal["fcfs", "priority"]
PrefixCachingHashAlgo = Literal["sha256", "xxhash"]
WarmupPolicy = Literal["all", "lazy"]
DataParallelRouting = Literal["load", "prefix"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""What is reported of output tokens: log probabilities or logits; raw as the model gives them, or processed: what was
sampled from, after masks, biases, penalties, temperature and filters."""

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_OVERTAKES = 64
HEARTBEAT_TIMEOUT = 60.0
"""Seconds for which an engine core's process may be silent."""

CASCADE_MIN_ROWS = 8
CASCADE_MIN_TOKENS = {"cpu": 256, "gpu": 1024}
"""On a GPU the second phase costs a layer some launches, as long as it takes to read a few hundred tokens of 64 requests."""

JUMP_AHEAD_MAX_ROWS = {"cpu": 8, "gpu": 64}
"""Tokens that needn't be sampled still make a step longer, for all who share it. Up to some size a step doesn't take longer for them,
as it waits for memory."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and what of it is used. `max_model_len` counts prompt and output tokens of one request."""

    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    vocab_size: int
    seed: int = 0
    served_model_name: str | None = None
    max_logprobs: int = MAX_LOGPROBS
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """The names of custom processors, and of their parameters with their defaults."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """`load_format`: "auto" reads the checkpoint, "dummy" makes random weights of its shapes. `quantization`: as what
    the checkpoint must be quantized, None for whatever it is. `dequantize`: weights that it has quantized are held in the
    model's dtype; None does so for GGUF files on a CPU."""

    load_format: str = "auto"
    download_dir: str | None = None
    revision: str | None = None
    quantization: str | None = None
    dequantize: bool | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache. Exactly one of the three sizes applies, the first that is set: a number of blocks, a number
    of bytes, a fraction of the device's memory. With `enable_prefix_caching`, requests share the blocks of equal
    beginnings, known by their hashes."""

    block_size: int
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"
    dtype: str | None = None
    """Of keys and values: "float8_e4m3fn" and "int8" have a scale per kv head; None is the model's dtype."""
    windows: tuple[int | None, ...] = (None,)
    """How far each group of layers looks back: so many tokens, the current one included, or at all (None, the first group
    only). A block holds some tokens for one group."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step. `long_prefill_token_threshold` caps a prefill chunk when > 0; the budget
    `max_num_batched_tokens` always does. With `cache_aware`, waiting requests of equal priority are admitted by the
    length of their cached prefix, each of them overtaken at most `max_overtakes` times. In steps of up to
    `jump_ahead_max_rows` requests, tokens that a grammar leaves no choice of are not sampled."""

    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int = 0
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    cache_aware: bool = False
    max_overtakes: int = MAX_OVERTAKES
    jump_ahead_max_rows: int = JUMP_AHEAD_MAX_ROWS["cpu"]


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """When decoding requests attend to a beginning that they share once for all of them: from `min_rows` requests on
    that share `min_tokens` tokens."""

    enabled: bool = True
    min_rows: int = CASCADE_MIN_ROWS
    min_tokens: int = CASCADE_MIN_TOKENS["cpu"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """`data_parallel_rank` is the engine's number among several of the same model. `expert_parallel`: the devices share
    the experts of a mixture, and not each expert's MLP rows."""

    tensor_parallel_size: int = 1
    data_parallel_rank: int = 0
    expert_parallel: bool = False


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """`max_loras` adapters of up to `max_lora_rank` are on the device, `max_cpu_loras` in the host's memory. `dtype`: of
    their matrices."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CompilationConfig:
    """`warmup`: "all" compiles every program before the first request, "lazy" each when first needed."""

    warmup: WarmupPolicy = "lazy"
    cache_dir: str | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelConfig
    load: LoadConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    compilation: CompilationConfig
    device: Device
    cascade: CascadeConfig = CascadeConfig()
    deterministic: bool = False
    """The bits of a request's logits depend neither on who shares its batch nor on how it was computed: in which chunks,
    after which prefix hits and preemptions."""
    speculative: SpeculativeConfig | None = None
    lora: LoRAConfig | None = None
    """None: no adapters."""
    pooler: PoolerConfig | None = None
    """Of an engine that makes vectors; None: it writes tokens."""

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of a block table; each group of layers has a block of its own for a column."""
        return -(-self.model.max_model_len // self.cache.block_size)
