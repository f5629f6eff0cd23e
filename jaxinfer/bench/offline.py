"""`jaxinfer bench latency` and `throughput`: an engine in this process, without HTTP."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jaxinfer.bench.args import LATENCY_DEFAULTS, THROUGHPUT_DEFAULTS
from jaxinfer.bench.datasets import BenchRequest, make_requests
from jaxinfer.bench.options import DatasetArgs, dataset_args
from jaxinfer.cli_args import engine_args
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def run_latency(parsed: argparse.Namespace) -> int:
    """The time of one batch, from its prompts to its last token."""
    for name in ("input_len", "output_len", "batch_size", "num_iters", "n"):
        _at_least(parsed, name, 1)
    _at_least(parsed, "num_iters_warmup", 0)
    dataset = DatasetArgs(
        num_prompts=parsed.batch_size,
        seed=getattr(parsed, "seed", 0),
        random_input_len=parsed.input_len,
        random_output_len=parsed.output_len,
    )
    from jaxinfer.llm import LLM

    with LLM.from_engine_args(engine_args(parsed, **LATENCY_DEFAULTS)) as llm:
        requests = make_requests(dataset, llm.get_tokenizer())
        for _ in tqdm(range(parsed.num_iters_warmup), "warm-up", disable=_is_quiet(parsed)):
            _generate(llm, requests, parsed.n)
        latencies = [
            _generate(llm, requests, parsed.n)[0]
            for _ in tqdm(range(parsed.num_iters), "measured", disable=_is_quiet(parsed))
        ]
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in _PERCENTILES}
    mean = float(np.mean(latencies))
    print(f"mean latency: {mean:.4f} s")
    for p, value in percentiles.items():
        print(f"p{p}: {value:.4f} s")
    _write(parsed, {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles})
    return 0


def run_throughput(parsed: argparse.Namespace) -> int:
    """All requests at once, as quickly as the engine can. What it compiles on the way is reported."""
    _at_least(parsed, "n", 1)
    dataset = dataset_args(parsed)
    from jaxinfer.llm import LLM

    with LLM.from_engine_args(engine_args(parsed, **THROUGHPUT_DEFAULTS)) as llm:
        requests = make_requests(dataset, llm.get_tokenizer())
        # The first steps load what no step has used yet.
        others = replace(dataset, num_prompts=min(4, dataset.num_prompts), seed=dataset.seed + 1)
        _generate(llm, make_requests(others, llm.get_tokenizer()), parsed.n)
        elapsed, num_prompt, num_output = _generate(
            llm, requests, parsed.n, use_tqdm=not _is_quiet(parsed)
        )
    total = num_prompt + num_output
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    print(
        f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['output_tokens_per_second']:.1f} output tokens/s"
    )
    print(
        f"{len(requests)} requests, {num_prompt} prompt and {num_output} output tokens in {elapsed:.2f} s"
    )
    _write(parsed, result)
    return 0


def _generate(
    llm: LLM,
    requests: list[BenchRequest],
    n: int,
    use_tqdm: bool | Callable[..., Any] = False,
) -> tuple[float, int, int]:
    """Seconds, prompt tokens, output tokens. Outputs have exactly the length that was asked for."""
    params = [
        SamplingParams(
            n=n,
            temperature=0.0 if n == 1 else 1.0,
            max_tokens=r.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for r in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=use_tqdm)
    elapsed = time.perf_counter() - start
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return elapsed, sum(len(output.prompt_token_ids) for output in outputs), num_output


def _is_quiet(parsed: argparse.Namespace) -> bool:
    return bool(parsed.disable_tqdm) or not sys.stderr.isatty()


def _at_least(parsed: argparse.Namespace, name: str, low: int) -> None:
    if getattr(parsed, name) < low:
        raise ValueError(f"{name} must be at least {low}, got {getattr(parsed, name)}.")


def _write(parsed: argparse.Namespace, result: dict[str, Any]) -> None:
    if parsed.output_json:
        path = Path(parsed.output_json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
