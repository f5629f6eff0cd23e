"""Flags of `jaxinfer bench`, named as vLLM's. Imports nothing that a plain install lacks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxinfer.bench.options import BACKENDS, DATASETS, DatasetArgs, Traffic
from jaxinfer.cli_args import add_engine_args, json_object

LATENCY_DEFAULTS: dict[str, Any] = dict(enable_prefix_caching=False)
"""The same batch again and again would find its prompts computed."""
THROUGHPUT_DEFAULTS: dict[str, Any] = dict(warmup="all")

type AddCommand = Callable[..., argparse.ArgumentParser]


def add_bench_commands(add: AddCommand) -> None:
    """`add(name, run, text)` makes the parser of one command, which calls `run` with what was parsed."""
    latency = add("latency", _latency, "time one batch, again and again")
    _offline_args(latency, **LATENCY_DEFAULTS)
    batch = latency.add_argument_group("batch")
    _number(batch, "--input-len", 32, "tokens per prompt")
    _number(batch, "--output-len", 128, "tokens per output")
    _number(batch, "--batch-size", 8, "prompts")
    _number(batch, "--n", 1, "outputs per prompt")
    _number(batch, "--num-iters-warmup", 10, "batches that aren't measured")
    _number(batch, "--num-iters", 30, "batches that are")

    throughput = add("throughput", _throughput, "run many requests as quickly as the engine can")
    _offline_args(throughput, **THROUGHPUT_DEFAULTS)
    _number(throughput, "--n", 1, "outputs per prompt")
    throughput.set_defaults(backend="offline", endpoint=None)
    _dataset_args(throughput, with_seed=False)

    serve = add("serve", _serve, "send requests to a server that runs, and time the answers")
    _server_args(serve)
    _request_args(serve)
    _traffic_args(serve)
    _dataset_args(serve)
    _result_args(serve)

    sweep = add("sweep", _sweep, "find the settings with the most throughput under a p99 limit")
    _sweep_args(sweep)
    _request_args(sweep)
    _traffic_args(sweep)
    _dataset_args(sweep)


def _offline_args(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    add_engine_args(parser, model_is_flag=True, **defaults)
    parser.add_argument("--output-json", metavar="FILE", help="write the figures here")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _number(group: Any, flag: str, default: int | None, text: str) -> None:
    group.add_argument(
        flag,
        type=int,
        default=default,
        metavar="N",
        help=text if default is None else f"{text} (default: %(default)s)",
    )


def _dataset_args(parser: argparse.ArgumentParser, with_seed: bool = True) -> None:
    default = DatasetArgs()
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=default.dataset_name,
        help="random and prefix_repetition are made up; sharegpt is ShareGPT's JSON file, custom a file of JSON lines "
        'with a "prompt" each (default: %(default)s)',
    )
    group.add_argument("--dataset-path", metavar="FILE", help="of sharegpt and custom")
    _number(group, "--num-prompts", default.num_prompts, "requests")
    if with_seed:
        _number(group, "--seed", default.seed, "of prompts and arrivals")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=default.random_range_ratio,
        metavar="R",
        help="lengths are uniform in [LEN * (1 - R), LEN * (1 + R)] (default: %(default)s)",
    )
    for name, text in (
        ("random_input_len", "tokens per prompt"),
        ("random_output_len", "tokens per output"),
        ("random_prefix_len", "tokens that all prompts begin with, beside those"),
        ("prefix_repetition_prefix_len", "tokens per prefix"),
        ("prefix_repetition_suffix_len", "tokens after it"),
        ("prefix_repetition_num_prefixes", "prefixes"),
        ("prefix_repetition_output_len", "tokens per output"),
        ("sharegpt_output_len", "tokens per output (default: as long as the file's answer)"),
        ("custom_output_len", 'tokens per output where the file has no "output_tokens"'),
    ):
        _number(group, f"--{name.replace('_', '-')}", getattr(default, name), text)
    _number(group, "--input-len", None, "sets the prompt length of made-up datasets (their suffix)")
    _number(group, "--output-len", None, "sets the output length of every dataset")


def _server_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="instead of host and port")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    group.add_argument(
        "--header", nargs="*", metavar="NAME=VALUE", help="sent along; $OPENAI_API_KEY is the key"
    )
    group.add_argument("--model", help="id or folder of the model (default: what the server says)")
    group.add_argument("--served-model-name", metavar="NAME", help="its name in requests")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600,
        metavar="SECONDS",
        help="to wait for the server (default: %(default)s)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _request_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="openai",
        help="openai and vllm are /v1/completions, openai-chat is /v1/chat/completions (default: %(default)s)",
    )
    group.add_argument("--tokenizer", help="id or path (default: the model's)")
    group.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="outputs have full length, as those of made-up datasets always do",
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="more fields of each request",
    )


def _traffic_args(parser: argparse.ArgumentParser) -> None:
    default = Traffic()
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate",
        type=float,
        default=default.request_rate,
        metavar="R",
        help="requests per second (default: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=default.burstiness,
        metavar="B",
        help="shape of the Gamma distributed intervals: 1 is Poisson, below 1 bursts (default: %(default)s)",
    )
    _number(
        group,
        "--max-concurrency",
        default.max_concurrency,
        "most requests at once; others wait their turn",
    )
    _number(group, "--num-warmups", default.num_warmups, "requests before those that count")


def _result_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests that meet all of these: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAME,…",
        help="latencies to report (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles",
        default="50,90,99",
        metavar="P,…",
        help="of each of them (default: %(default)s)",
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with figures per request")
    group.add_argument("--result-dir", metavar="DIR", help="(default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: settings and date)")
    group.add_argument("--metadata", nargs="*", metavar="NAME=VALUE", help="put into the file")
    group.add_argument("--label", help="of the run, in the file and its name")
    group.add_argument("--plot", metavar="FILE.svg", help="draw requests and latencies")


def _sweep_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="id, folder or file of the model")
    group = parser.add_argument_group("settings to try")
    for flag, text in (
        ("--max-num-seqs", "most requests that run at once"),
        ("--max-num-batched-tokens", "most tokens in a step"),
    ):
        group.add_argument(flag, nargs="+", type=int, required=True, metavar="N", help=text)
    group.add_argument(
        "--p99-limit",
        nargs="+",
        required=True,
        metavar="NAME:MS",
        help="limits on the 99th percentile of ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument(
        "--serve-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="…",
        help="the rest of the line goes to jaxinfer serve",
    )
    _number(group, "--rate-trials", 4, "request rates to try where the limit isn't met at once")
    for flag, default, text in (
        ("--start-timeout", 1800.0, "for a server to be ready"),
        ("--trial-timeout", 1800.0, "for one measurement"),
    ):
        group.add_argument(
            flag,
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument("--output-json", metavar="FILE", help="write all trials here")
    parser.set_defaults(endpoint=None)


def _latency(parsed: argparse.Namespace) -> int:
    from jaxinfer.bench.offline import run_latency

    return run_latency(parsed)


def _throughput(parsed: argparse.Namespace) -> int:
    from jaxinfer.bench.offline import run_throughput

    return run_throughput(parsed)


def _serve(parsed: argparse.Namespace) -> int:
    try:
        from jaxinfer.bench.serve import run
    except ModuleNotFoundError as error:
        raise _needs(error) from error
    return run(parsed)


def _sweep(parsed: argparse.Namespace) -> int:
    try:
        from jaxinfer.bench.sweep import run
    except ModuleNotFoundError as error:
        raise _needs(error) from error
    return run(parsed)


def _needs(error: ModuleNotFoundError) -> ValueError:
    return ValueError(
        f"this benchmark needs {error.name}; install it with pip install 'jaxinfer[server]'."
    )
