"""vLLM on CPU, engine core in-process. The launcher preloads tcmalloc and libiomp5."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import tempfile

from worker import Engine, Prompts, serve

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def build(args: argparse.Namespace) -> Engine:
    os.environ.update(ENVIRONMENT)
    # Its ahead-of-time cache of an earlier start fails to load, so every start compiles anew.
    cache = tempfile.mkdtemp(prefix="vllm-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["VLLM_CACHE_ROOT"] = cache
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, seed=0)

    def generate(prompts: Prompts, max_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [
            list(request.outputs[0].token_ids)
            for request in llm.generate(requests, params, use_tqdm=False)
        ]

    return Engine(
        version=vllm.__version__,
        settings="in-process core, prefix caching, tcmalloc and libiomp5 preloaded, nobind",
        generate=generate,
        reset=llm.reset_prefix_cache,
    )


if __name__ == "__main__":
    serve(build)
