"""What crosses between the processes of API servers and of engine cores: msgpack, one message per frame."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs, EngineCoreRequest
from jaxinfer.engine_args import EngineArgs

OWNER = 0
"""The client that started a core's process: it hears of every step's statistics, whoever sent the requests."""


class Start(msgspec.Struct, array_like=True, tag=True):
    """The first message: what to build, and how often to give a sign of life."""

    args: EngineArgs
    beat_seconds: float = 1.0


class Attach(msgspec.Struct, array_like=True, tag=True):
    """Another client beside the one that started the core (number 0): it listens at `address`."""

    client: int
    address: str


class Detach(msgspec.Struct, array_like=True, tag=True):
    """This client is gone: its requests end."""

    client: int


class Add(msgspec.Struct, array_like=True, tag=True):
    """Its outputs go to `client`."""

    request: EngineCoreRequest
    client: int = 0


class Abort(msgspec.Struct, array_like=True, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, array_like=True, tag=True):
    """Drop what is unfinished and exit."""


class Call(msgspec.Struct, array_like=True, tag=True):
    """`EngineCore.call`; answered by a `Returned` of the same number."""

    number: int
    name: str
    arguments: list[Any]
    client: int = 0


type ToCore = Start | Attach | Detach | Add | Abort | Call | Stop


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


class Beat(msgspec.Struct, array_like=True, tag=True):
    """The core's loop goes round, and how much there is to do. Sent between steps, a few times a second, and while there
    is nothing to do. `num_received`: requests that this client has sent and the core has read."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_received: int = 0


class Pause(msgspec.Struct, array_like=True, tag=True):
    """Nothing will be heard for as long as it takes: the core waits for a compilation, or answers a call."""


type FromCore = Ready | Outputs | Returned | Died | Beat | Pause
