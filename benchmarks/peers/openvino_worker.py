"""OpenVINO GenAI's continuous batching pipeline (paged cache, prefix caching), from a GGUF file."""

from __future__ import annotations

import argparse
import os

from worker import Engine, Prompts, serve

FIRST_ID = 300
CACHE_GB = 4
PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def build(args: argparse.Namespace) -> Engine:
    import numpy as np
    import openvino
    import openvino_genai

    if not args.gguf:
        raise SystemExit("OpenVINO reads a GGUF file here: pass --gguf to the benchmark")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 64
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        args.gguf,
        scheduler_config=scheduler,
        device="CPU",
        properties={
            "INFERENCE_PRECISION_HINT": PRECISION[args.dtype],
            "INFERENCE_NUM_THREADS": args.threads,
        },
    )
    shift = 0

    def forget() -> None:
        nonlocal shift
        shift += 17

    def generate(prompts: Prompts, max_tokens: int) -> Prompts:
        # No call empties its prefix cache: other ids of the same lengths and the same sharing miss it instead. The
        # outputs can't be compared with another engine's then.
        span = args.vocab_size - FIRST_ID
        shifted = [[(token - FIRST_ID + shift) % span + FIRST_ID for token in p] for p in prompts]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in shifted]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]

    return Engine(
        version=openvino_genai.__version__,
        settings=f"{os.path.basename(args.gguf)}, prefix caching, {args.threads} threads",
        generate=generate,
        reset=forget,
    )


if __name__ == "__main__":
    serve(build)
