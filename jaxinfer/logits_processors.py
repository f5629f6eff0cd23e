"""Functions of one's own that change logits before a token is chosen, compiled into the sampler."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

EXTRA_ARG = "logits_processors"
"""The key of `SamplingParams.extra_args` under which a request asks for processors."""

type Parameters = dict[str, float]


class RowState(NamedTuple):
    """What a processor is told of the R rows whose logits it gets; what it doesn't read costs nothing.

    Rows that haven't asked for the processor are there too (their parameters are 0), and left as they were.
    """

    parameters: dict[str, jax.Array]
    """By name, each [R] float32."""
    num_output: jax.Array
    """[R] int32, tokens generated so far."""
    position: jax.Array
    """[R] int32, tokens so far: prompt and output."""
    counts: jax.Array
    """[R, V] int32, how often each token is in the output."""
    in_prompt: jax.Array
    """[R, V] bool"""


type Function = Callable[[jax.Array, RowState], jax.Array]


@dataclass(frozen=True)
class LogitsProcessor:
    """`function` maps logits [R, V] float32 and a `RowState` to new logits, and has to be traceable by `jax.jit`.

    `parameters` are the numbers that a request may give: a list of names, or a dict with the value of each for
    requests that leave it out (None: they may not).
    """

    function: Function
    parameters: Mapping[str, float | None] | Iterable[str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"A logits processor's function must be callable, got {self.function!r}."
            )
        given = self.parameters
        defaults = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
        for name, default in defaults.items():
            if not isinstance(name, str):
                raise ValueError(f"parameters must be named by strings, got {name!r}.")
            if default is not None:
                defaults[name] = _number(f"parameters[{name!r}]", default)
        object.__setattr__(self, "parameters", defaults)


def check_declared(given: Any) -> None:
    """Raises `ValueError` for what `resolve_processors` can't be given; imports nothing."""
    if not isinstance(given, Mapping):
        raise ValueError(f"logits_processors must map names to processors, got {given!r}.")
    for name, value in given.items():
        if not isinstance(name, str):
            raise ValueError(f"logits_processors must be named by strings, got {name!r}.")
        if not isinstance(value, str | LogitsProcessor) and not callable(value):
            raise ValueError(
                f"logits_processors[{name!r}] must be a LogitsProcessor, a function, or the name of one as "
                f'"module:function", got {value!r}.'
            )


def resolve_processors(given: Mapping[str, Any]) -> dict[str, LogitsProcessor]:
    """By name: a `LogitsProcessor`, a function without parameters, or where either is found, "module:name".

    Raises `ValueError` for anything else.
    """
    check_declared(given)
    return {name: _resolve(name, value) for name, value in given.items()}


def check_importable(given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for processors that can't be named to another process."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise ValueError(
                f"logits_processors[{name!r}]: the engine core runs in a process of its own, which can't be given "
                'functions; name it as "module:function".'
            )


def complete_request(
    extra_args: Mapping[str, Any], known: Mapping[str, Mapping[str, float | None]]
) -> dict[str, Parameters]:
    """The processors that a request asks for, each with a value for all its parameters. `known`: by name, the
    parameters and their defaults. Raises `ValueError` for what isn't known, and for what is missing."""
    unknown = sorted(map(str, extra_args.keys() - {EXTRA_ARG}))
    if unknown:
        raise ValueError(f"extra_args may hold {EXTRA_ARG!r} only, got {unknown}.")
    asked = extra_args.get(EXTRA_ARG) or {}
    if not isinstance(asked, dict):
        raise ValueError(
            f"extra_args[{EXTRA_ARG!r}] must map the names of processors to their parameters, got {asked!r}."
        )
    complete: dict[str, Parameters] = {}
    for name, parameters in asked.items():
        if name not in known:
            have = sorted(known) or "none"
            raise ValueError(f"extra_args: there is no logits processor {name!r}; there is {have}.")
        complete[name] = _complete(name, parameters, known[name])
    return complete


def _complete(name: str, given: Any, known: Mapping[str, float | None]) -> Parameters:
    where = f"extra_args: parameters of the logits processor {name!r}"
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a dict, got {given!r}.")
    if unknown := sorted(map(str, given.keys() - known.keys())):
        raise ValueError(f"{where} are {sorted(known)}, got {unknown}.")
    complete = {}
    for parameter, default in known.items():
        value = given.get(parameter, default)
        if value is None:
            raise ValueError(f"{where}: {parameter!r} must be given.")
        complete[parameter] = _number(f"{where}: {parameter!r}", value)
    return complete


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def _resolve(name: str, value: Any) -> LogitsProcessor:
    if isinstance(value, str):
        value = _import(name, value)
    return value if isinstance(value, LogitsProcessor) else LogitsProcessor(value)


def _import(name: str, path: str) -> Any:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f'logits_processors[{name!r}] must have the form "module:function", got {path!r}.'
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"logits_processors[{name!r}]: can't import {path!r}: {error}") from error
