"""What crosses between the API server's process and the engine core's: msgpack, one message per frame."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxinfer.config import EngineArgs, EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs, EngineCoreRequest


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: what to build."""

    args: EngineArgs


class Add(msgspec.Struct, array_like=True, tag=True):
    request: EngineCoreRequest


class Abort(msgspec.Struct, array_like=True, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, array_like=True, tag=True):
    """Drop what is unfinished and exit."""


class Call(msgspec.Struct, array_like=True, tag=True):
    """`EngineCore.call`; answered by a `Returned` of the same number."""

    number: int
    name: str
    arguments: list[Any]


type ToCore = Start | Add | Abort | Call | Stop


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The core serves. `num_blocks` counts the padding block of the KV cache."""

    config: EngineConfig
    num_blocks: int


class Outputs(msgspec.Struct, array_like=True, tag=True):
    """With `same_ids`, the `request_ids` are those of the message before and were left out."""

    outputs: EngineCoreOutputs
    same_ids: bool = False


class Died(msgspec.Struct, array_like=True, tag=True):
    """The core could not be built (`is_bad_input` when what was asked for is at fault), or a step has failed. The
    process exits."""

    text: str
    is_bad_input: bool = False


class Returned(msgspec.Struct, array_like=True, tag=True):
    """What a call returned, or the text of the `ValueError` that it raised."""

    number: int
    value: Any = None
    error: str | None = None


type FromCore = Ready | Outputs | Returned | Died
