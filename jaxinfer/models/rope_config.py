"""Rotary frequencies from a Hugging Face config, in both the older form (`rope_scaling` beside `rope_theta`) and the
newer one (`rope_parameters`, possibly one entry per layer type)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.models.spec import RopeSpec

Config = Mapping[str, Any]

_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def rope_parameters(config: Config, *, default_theta: float = 10000.0) -> dict[str, Any]:
    """The config's rotary parameters for all layers: `rope_type`, `rope_theta` and what the type needs.

    Raises `ValueError` when the config has different ones per layer type.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(
            f"rope_parameters per layer type ({sorted(parameters)}) are not supported by this "
            f"architecture."
        )
    return complete_rope_parameters(config, parameters, config.get("rope_theta", default_theta))


def complete_rope_parameters(
    config: Config, parameters: Config, theta: float | None
) -> dict[str, Any]:
    """Fill in what configs may leave to their surroundings: type, theta, partial rotation, original length."""
    completed = dict(parameters)
    if completed.get("rope_type") is None:
        completed["rope_type"] = completed.get("type", "default")
    if completed.get("rope_theta") is None:
        completed["rope_theta"] = theta
    if completed.get("partial_rotary_factor") is None:
        completed["partial_rotary_factor"] = config.get("partial_rotary_factor") or 1.0
    original = config.get("original_max_position_embeddings") or completed.get(
        "original_max_position_embeddings"
    )
    completed["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    return completed


def rope_spec(
    parameters: Config, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> RopeSpec:
    """The frequencies of completed rotary parameters, as transformers computes them.

    `max_model_len`, the longest request that the engine admits, chooses between longrope's short and long
    frequencies: once for all requests, so that a token's key never depends on how long its request becomes.
    Raises `ValueError` for an unknown type or a missing field.
    """
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        return RopeSpec(_base_frequencies(parameters, head_dim))
    if rope_type not in _VARIANTS:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported; supported: {['default', *_VARIANTS]}."
        )
    for name in _REQUIRED[rope_type]:
        if parameters.get(name) is None:
            raise ValueError(f"rope_parameters of type {rope_type!r} must hold {name!r}.")
    return _VARIANTS[rope_type](parameters, head_dim, max_position_embeddings, max_model_len)


def scaled_max_positions(parameters: Config, max_position_embeddings: int) -> int:
    """The longest sequence that the scaled rotary embedding covers. Configs of the yarn and linear types give the
    length before scaling; the other types' configs have it scaled already."""
    factor = parameters.get("factor") or 1.0
    if parameters["rope_type"] == "yarn":
        original = parameters["original_max_position_embeddings"]
        return max(max_position_embeddings, int(original * factor))
    if parameters["rope_type"] == "linear":
        return int(max_position_embeddings * factor)
    return max_position_embeddings


def _base_frequencies(parameters: Config, head_dim: int) -> tuple[float, ...]:
    rotary_dim = int(head_dim * parameters["partial_rotary_factor"])
    theta = parameters["rope_theta"]
    return tuple(theta ** (-i / rotary_dim) for i in range(0, rotary_dim, 2))


def _linear(parameters: Config, head_dim: int, *_: int) -> RopeSpec:
    factor = parameters["factor"]
    return RopeSpec(tuple(f / factor for f in _base_frequencies(parameters, head_dim)))


def _llama3(parameters: Config, head_dim: int, *_: int) -> RopeSpec:
    """Low frequencies are divided by the factor, high ones kept, those between blended (Llama 3.1)."""
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - keep) * frequency / factor + keep * frequency

    return RopeSpec(tuple(scaled(f) for f in _base_frequencies(parameters, head_dim)))


def _yarn(
    parameters: Config, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> RopeSpec:
    """Interpolated below `beta_slow` turns in the original context, kept above `beta_fast` (arXiv 2309.00071)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_position_embeddings / original
    frequencies = _base_frequencies(parameters, head_dim)
    rotary_dim, theta = 2 * len(frequencies), parameters["rope_theta"]

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) or 0.001

    def scaled(i: int, frequency: float) -> float:
        interpolate = min(max((i - low) / width, 0.0), 1.0)
        return interpolate * frequency / factor + (1 - interpolate) * frequency

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention_factor = _mscale(factor, 1.0)
    return RopeSpec(tuple(scaled(i, f) for i, f in enumerate(frequencies)), attention_factor)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    parameters: Config, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> RopeSpec:
    """A divisor per frequency, one list for contexts within the original length, one beyond (arXiv 2402.13753)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_position_embeddings / original
    name = "long_factor" if max_model_len > original else "short_factor"
    frequencies = _base_frequencies(parameters, head_dim)
    if len(parameters[name]) != len(frequencies):
        raise ValueError(
            f"{name} must have {len(frequencies)} entries, got {len(parameters[name])}."
        )
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    divided = tuple(f / d for f, d in zip(frequencies, parameters[name], strict=True))
    return RopeSpec(divided, attention_factor)


_VARIANTS: dict[str, Callable[[Config, int, int, int], RopeSpec]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
