"""What a benchmark is told: the dataset, the traffic, and the fields of each request. Flags have vLLM's names."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")
BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""And the endpoints that they speak to."""


@dataclass(frozen=True, slots=True)
class DatasetArgs:
    """vLLM's flags of the same names. A range ratio r draws lengths L uniformly from [L(1 - r), L(1 + r)].

    Of made-up prompts, `as_text` makes texts in place of token ids, for endpoints that take nothing else.
    """

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    as_text: bool = False

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ValueError(f"dataset_name must be one of {DATASETS}, got {self.dataset_name!r}.")
        if (self.dataset_name in ("sharegpt", "custom")) != (self.dataset_path is not None):
            raise ValueError(
                f"dataset_path must be a file for sharegpt and custom, and absent for other datasets; got "
                f"{self.dataset_path!r} for {self.dataset_name}."
            )
        for name, low in (
            ("num_prompts", 1),
            ("seed", 0),
            ("random_input_len", 1),
            ("random_output_len", 1),
            ("random_prefix_len", 0),
            ("prefix_repetition_prefix_len", 1),
            ("prefix_repetition_suffix_len", 1),
            ("prefix_repetition_num_prefixes", 1),
            ("prefix_repetition_output_len", 1),
            ("sharegpt_output_len", 1),
            ("custom_output_len", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}.")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(
                f"random_range_ratio must be in [0, 1), got {self.random_range_ratio}."
            )

    @property
    def is_made_up(self) -> bool:
        """Outputs have the length that was asked for, whatever the text: they don't end with it."""
        return self.dataset_name in ("random", "prefix_repetition")


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests come: `request_rate` a second (infinite: all at once) at intervals that are Gamma distributed with
    shape `burstiness`. `num_warmups` others go before them and count for nothing."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(
                f"request_rate must be above 0 (inf: all at once), got {self.request_rate}."
            )
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ValueError(f"burstiness must be a number above 0, got {self.burstiness}.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {self.max_concurrency}.")
        if self.num_warmups < 0:
            raise ValueError(f"num_warmups must be at least 0, got {self.num_warmups}.")


def dataset_args(parsed: argparse.Namespace) -> DatasetArgs:
    """`input_len` and `output_len` stand for the lengths of whichever dataset it is."""
    fields = {
        name: getattr(parsed, name) for name in DatasetArgs.__slots__ if hasattr(parsed, name)
    }
    for value, names in (
        (parsed.input_len, ("random_input_len", "prefix_repetition_suffix_len")),
        (
            parsed.output_len,
            (
                "random_output_len",
                "prefix_repetition_output_len",
                "sharegpt_output_len",
                "custom_output_len",
            ),
        ),
    ):
        if value is not None:
            fields |= dict.fromkeys(names, value)
    endpoint = parsed.endpoint or BACKENDS.get(parsed.backend, "")
    return DatasetArgs(**fields | {"as_text": endpoint.endswith("/chat/completions")})


def traffic_args(parsed: argparse.Namespace) -> Traffic:
    return Traffic(**{name: getattr(parsed, name) for name in Traffic.__slots__})


def request_fields(parsed: argparse.Namespace, dataset: DatasetArgs) -> dict[str, Any]:
    """Greedy unless told otherwise; made-up prompts never end by themselves."""
    fields: dict[str, Any] = {"temperature": parsed.temperature}
    for name in ("top_p", "top_k"):
        if getattr(parsed, name) is not None:
            fields[name] = getattr(parsed, name)
    if parsed.ignore_eos or dataset.is_made_up:
        fields["ignore_eos"] = True
    return fields | parsed.extra_body
