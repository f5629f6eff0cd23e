"""`jaxinfer bench sweep`: which max_num_seqs and max_num_batched_tokens give the most throughput within a latency limit."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.bench.options import (
    BACKENDS,
    DatasetArgs,
    Traffic,
    dataset_args,
    request_fields,
    traffic_args,
)
from jaxinfer.bench.report import limits, summarize
from jaxinfer.bench.serve import Target, measure, wait_until_ready
from jaxinfer.bench.server_process import server_process
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.weights.resolve import resolve_model

_PERCENTILES = (50.0, 90.0, 99.0)
_SEED_STEP = 1000
"""Each trial has prompts of its own, which no prefix cache knows from the trial before."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement. `figures` is None, and `error` says why, where there was none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    request_rate: float
    meets_limit: bool = False
    figures: dict[str, Any] | None = None
    error: str | None = None

    @property
    def output_throughput(self) -> float:
        return self.figures["output_throughput"] if self.figures else 0.0


@dataclass(frozen=True, slots=True)
class _Measured:
    """A configuration whose server runs."""

    configuration: Trial
    target: Target
    dataset: DatasetArgs
    traffic: Traffic
    tokenizer: Tokenizer
    timeout: float
    p99: Mapping[str, float]

    def attempt(self, rate: float, number: int) -> Trial:
        """Raises `TimeoutError` when it takes longer than the seconds that it has."""
        dataset = replace(self.dataset, seed=self.dataset.seed + _SEED_STEP * number)
        traffic = replace(self.traffic, request_rate=rate)

        async def limited() -> dict[str, Any]:
            async with asyncio.timeout(self.timeout):
                found = await measure(self.target, dataset, traffic, self.tokenizer, False)
            return summarize(*found, _PERCENTILES)

        figures = asyncio.run(limited())
        return replace(
            self.configuration,
            request_rate=rate,
            meets_limit=meets(figures, self.p99),
            figures=figures,
        )


def run(parsed: argparse.Namespace) -> int:
    """0; 1 when no configuration met the limit."""
    p99 = limits("p99_limit", parsed.p99_limit)
    for name in ("rate_trials", "start_timeout", "trial_timeout"):
        if getattr(parsed, name) <= 0:
            raise ValueError(f"{name} must be above 0, got {getattr(parsed, name)}.")
    grid = configurations(parsed.max_num_seqs, parsed.max_num_batched_tokens)
    dataset, traffic = dataset_args(parsed), traffic_args(parsed)
    tokenizer = Tokenizer.load(resolve_model(parsed.tokenizer or parsed.model))
    trials: list[Trial] = []

    def record(trial: Trial) -> None:
        trials.append(trial)
        print(_line(trial, p99), flush=True)

    for max_num_seqs, budget in grid:
        arguments = [parsed.model, *parsed.serve_args]
        arguments += ["--max-num-seqs", str(max_num_seqs)]
        arguments += ["--max-num-batched-tokens", str(budget)]
        configuration = Trial(max_num_seqs, budget, traffic.request_rate)
        try:
            with server_process(arguments, parsed.start_timeout) as url:
                measured = _Measured(
                    configuration,
                    _target(parsed, url, dataset),
                    dataset,
                    traffic,
                    tokenizer,
                    parsed.trial_timeout,
                    p99,
                )
                search_rate(measured.attempt, traffic.request_rate, parsed.rate_trials, record)
        except (OSError, TimeoutError) as error:
            text = str(error) or f"not done within {parsed.trial_timeout} s"
            record(replace(configuration, error=text))
    best = best_trial(trials)
    if parsed.output_json:
        path = Path(parsed.output_json)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "p99_limit_ms": p99,
            "best": None if best is None else _plain(best),
            "trials": [_plain(trial) for trial in trials],
        }
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if best is None:
        print("jaxinfer: error: no configuration meets the limit.", file=sys.stderr)
        return 1
    print(
        f"best: --max-num-seqs {best.max_num_seqs} --max-num-batched-tokens {best.max_num_batched_tokens} "
        f"at {best.request_rate:.4g} requests/s: {best.output_throughput:.1f} output tokens/s"
    )
    return 0


def configurations(max_num_seqs: list[int], budgets: list[int]) -> list[tuple[int, int]]:
    """All pairs that an engine takes: a step holds a token of each sequence. Raises `ValueError` where none is left."""
    pairs = [(seqs, budget) for seqs in max_num_seqs for budget in budgets if 1 <= seqs <= budget]
    if not pairs:
        raise ValueError(
            f"max_num_batched_tokens must hold a value of at least one of max_num_seqs; got {budgets} and {max_num_seqs}."
        )
    return list(dict.fromkeys(pairs))


def search_rate(
    attempt: Callable[[float, int], Trial],
    highest: float,
    num_trials: int,
    record: Callable[[Trial], None],
) -> None:
    """The highest request rate within the limit, in at most `num_trials` attempts: first `highest` (which may be
    infinite: all at once), then by bisection below what it came to."""
    trial = attempt(highest, 0)
    record(trial)
    if trial.meets_limit or trial.figures is None:
        return
    low, high = 0.0, min(highest, trial.figures["request_throughput"])
    for number in range(1, num_trials):
        if high <= 0:
            return
        rate = (low + high) / 2
        trial = attempt(rate, number)
        record(trial)
        if trial.meets_limit:
            low = rate
        else:
            high = rate


def meets(figures: Mapping[str, Any], p99: Mapping[str, float]) -> bool:
    """Whether all requests succeeded and every limit (ms) holds for the 99th percentile."""
    if figures["failed"] or not figures["completed"]:
        return False
    return all(
        figures[f"p99_{name}_ms"] <= limit
        for name, limit in p99.items()
        if figures[f"p99_{name}_ms"] is not None
    )


def best_trial(trials: list[Trial]) -> Trial | None:
    """The most output tokens per second among those that meet the limit."""
    good = [trial for trial in trials if trial.meets_limit]
    return max(good, key=lambda trial: trial.output_throughput, default=None)


def _target(parsed: argparse.Namespace, url: str, dataset: DatasetArgs) -> Target:
    card = wait_until_ready(url, {}, parsed.start_timeout)
    endpoint = BACKENDS[parsed.backend]
    return Target(url, endpoint, card["id"], {}, request_fields(parsed, dataset))


def _plain(trial: Trial) -> dict[str, Any]:
    rate = trial.request_rate
    return asdict(trial) | {"request_rate": rate if math.isfinite(rate) else "inf"}


def _line(trial: Trial, p99: Mapping[str, float]) -> str:
    head = f"max_num_seqs {trial.max_num_seqs}, max_num_batched_tokens {trial.max_num_batched_tokens}, "
    head += f"{trial.request_rate:.4g} requests/s: "
    if trial.figures is None:
        return f"{head}{trial.error}"
    found = ", ".join(f"p99 {name} {trial.figures[f'p99_{name}_ms'] or 0.0:.1f} ms" for name in p99)
    verdict = "within" if trial.meets_limit else "beyond"
    return f"{head}{trial.output_throughput:.1f} output tokens/s, {found}: {verdict} the limit"
