"""Small configs and requests for engine cores without a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.config import (
    CacheConfig,
    CascadeConfig,
    CompilationConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.lora_request import LoRARequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative_config import SpeculativeConfig, speculative_config

VOCAB = 50
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
CASCADE = CascadeConfig(min_rows=2, min_tokens=BLOCK_SIZE)

NextToken = Callable[[Sequence[int]], int]


def hashed_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.array(context, np.int32).tobytes()) % VOCAB


def make_config(
    *,
    max_num_seqs: int = 4,
    budget: int = 16,
    threshold: int = 0,
    policy: str = "fcfs",
    overlap: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    block_size: int = BLOCK_SIZE,
    prefix_caching: bool = True,
    hash_algo: str = "sha256",
    cache_aware: bool = False,
    max_overtakes: int = 64,
    jump_ahead_max_rows: int = 64,
    cascade: CascadeConfig = CASCADE,
    speculative: SpeculativeConfig | None = None,
    windows: tuple[int | None, ...] = (None,),
    lora: LoRAConfig | None = None,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", "fake", "float32", max_model_len, VOCAB),
        load=LoadConfig(),
        cache=CacheConfig(
            block_size,
            enable_prefix_caching=prefix_caching,
            prefix_caching_hash_algo=hash_algo,  # type: ignore[arg-type]
            windows=windows,
        ),
        scheduler=SchedulerConfig(
            budget,
            max_num_seqs,
            threshold,
            policy,  # type: ignore[arg-type]
            overlap,
            cache_aware,
            max_overtakes,
            jump_ahead_max_rows,
        ),
        parallel=ParallelConfig(),
        compilation=CompilationConfig(),
        device="cpu",
        cascade=cascade,
        speculative=speculative,
        lora=lora,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int] | int = 5,
    *,
    eos: Sequence[int] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
    salt: str | None = None,
    grammar: str | None = None,
    lora: LoRARequest | None = None,
    **params: object,
) -> EngineCoreRequest:
    """`prompt` as a number: that many tokens, others for every request id."""
    if isinstance(prompt, int):
        seed = zlib.crc32(request_id.encode())
        prompt = [(seed >> (i % 24)) % VOCAB for i in range(prompt)]
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
        arrival_time,
        list(eos),
        priority,
        salt,
        grammar,
        lora=lora,
    )


def speculative(num_tokens: int = 3, **more: object) -> SpeculativeConfig:
    given = {"method": "ngram", "num_speculative_tokens": num_tokens, **more}
    return speculative_config(given, "cpu")
