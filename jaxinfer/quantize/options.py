"""What `jaxinfer quantize` may be told, and its command-line flags. No JAX here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

Method = Literal["awq", "int8", "fp8"]
METHODS: tuple[Method, ...] = ("awq", "int8", "fp8")
GROUP_SIZES = (128, 64, 32)
"""Weights of a row that share a scale, as readers of AWQ checkpoints know them."""


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How to quantize.

    Attributes:
        method: "awq": matrices of 4 bits; "int8", "fp8": of 8, and activations rounded alike while the model runs.
        group_size: of "awq", weights that share a scale; None: the largest of 128, 64 and 32 that fits.
        search: of "awq", whether scales are searched on the calibration text; otherwise weights are only rounded.
        clip: whether the ends of each group's grid are searched, or reach to its least weight and its greatest.
        compensate: whether, as columns are rounded one after the other, later ones make up for earlier ones' errors.
        embedding: "int8": the embedding, and with it a tied head, in 8 bits too.
        calibration: a text file, None for the one that comes along.
        num_samples: pieces of the text that are used.
        sample_length: tokens of each.
    """

    method: Method = "awq"
    group_size: int | None = None
    search: bool = True
    clip: bool = True
    compensate: bool = True
    embedding: Literal["int8"] | None = None
    calibration: Path | None = None
    num_samples: int = 16
    sample_length: int = 512

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if self.embedding not in (None, "int8"):
            raise ValueError(f"embedding must be None or 'int8', got {self.embedding!r}.")
        if self.group_size is not None and self.method != "awq":
            raise ValueError(
                f"group_size ({self.group_size}) is of method 'awq', not of {self.method!r}."
            )
        if self.group_size not in (None, *GROUP_SIZES):
            raise ValueError(
                f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {self.group_size}."
            )
        for name in ("num_samples", "sample_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.calibration is not None and not self.calibration.is_file():
            raise ValueError(f"calibration: there is no file {self.calibration}.")


def add_quantize_args(parser: argparse.ArgumentParser) -> None:
    """Their destinations are the fields of `QuantizeOptions`; what isn't typed is left out of the parsed arguments."""
    default = {field.name: field.default for field in fields(QuantizeOptions)}

    def add(name: str, text: str, **options: object) -> None:
        if default[name] is not None:
            text = f"{text} (default: {default[name]})"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=text, **options)  # type: ignore[arg-type]

    add("method", "awq: 4-bit weights; int8, fp8: 8-bit weights and activations", choices=METHODS)
    add("group_size", "of awq: 128, 64 or 32 (default: the largest that fits)", type=int)
    add(
        "search",
        "of awq: search scales on the calibration text; else weights are only rounded",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "clip",
        "of awq: search where the grid of each group of weights ends",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "compensate",
        "of awq: let later columns make up for the rounding of earlier ones",
        action=argparse.BooleanOptionalAction,
    )
    add("embedding", "keep the embedding, and a tied head, in 8 bits too", choices=("int8",))
    add("calibration", "text file (default: one that comes along)", type=Path, metavar="FILE")
    add("num_samples", "pieces of the text that are used", type=int, metavar="N")
    add("sample_length", "tokens of each", type=int, metavar="N")


def quantize_options(parsed: argparse.Namespace) -> QuantizeOptions:
    """Raises `ValueError` for values that `QuantizeOptions` refuses."""
    names = [field.name for field in fields(QuantizeOptions)]
    return QuantizeOptions(
        **{name: getattr(parsed, name) for name in names if hasattr(parsed, name)}
    )
