"""vLLM's scheduler alone, decoding: `python host_loop_vllm.py MODEL_DIR NUM_RUNNING`, in an environment with vLLM.

The last line of stdout is JSON: medians over the steps in which all requests decode, of `Scheduler.schedule` and
`Scheduler.update_from_output`, in ms. The workload is the one of `benchmarks/host_loop.py`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = 128, 256, 2048


def build_scheduler(model: str, num_running: int) -> tuple[Scheduler, int]:
    config = EngineArgs(
        model=model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
    ).create_engine_config()
    block_size = config.cache_config.block_size or 16
    num_blocks = num_running * 40
    config.cache_config.num_gpu_blocks = num_blocks
    layer = FullAttentionSpec(
        block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.bfloat16
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
    )
    return scheduler, block_size


def main(model: str, num_running: int) -> None:
    scheduler, block_size = build_scheduler(model, num_running)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    rng = random.Random(0)
    for i in range(num_running):
        scheduler.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=[rng.randrange(300, 40000) for _ in range(PROMPT_TOKENS)],
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True
                ),
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    schedule_s, update_s = [], []
    while scheduler.has_unfinished_requests():
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        before = time.perf_counter()
        scheduler.update_from_output(plan, result)
        after = time.perf_counter()
        if len(ids) == num_running == plan.total_num_scheduled_tokens:
            schedule_s.append(scheduled - start)
            update_s.append(after - before)
    print(
        json.dumps(
            {
                "vllm": vllm.__version__,
                "running": num_running,
                "steps": len(schedule_s),
                "schedule_ms": statistics.median(schedule_s) * 1e3,
                "update_ms": statistics.median(update_s) * 1e3,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
