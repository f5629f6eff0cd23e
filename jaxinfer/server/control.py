"""What crosses between API server processes and the supervisor that started them: msgpack, one message per frame."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from jaxinfer import metrics
from jaxinfer.engine.ipc import Ready
from jaxinfer.engine_args import EngineArgs
from jaxinfer.frontend.plugins import load_plugin
from jaxinfer.server.args import ListenArgs, load_middleware
from jaxinfer.server.response_store import StoredResponse
from jaxinfer.server.settings import ServerSettings


class StartServer(msgspec.Struct, array_like=True, tag=True):
    """The first message. `client` is the process's number among the cores' clients. Sockets are made in `directory`."""

    args: EngineArgs
    settings: dict[str, Any]
    listen: ListenArgs
    client: int
    directory: str


def pack_settings(settings: ServerSettings) -> dict[str, Any]:
    """What of it can travel."""
    packed: dict[str, Any] = msgspec.to_builtins(dataclasses.replace(settings, middleware=()))
    return packed


def unpack_settings(packed: dict[str, Any]) -> ServerSettings:
    """With the plugins run and the middleware found again. Raises `ValueError` where that can't be."""
    for path in packed["plugins"]:
        load_plugin(path)
    settings = msgspec.convert(packed, ServerSettings)
    middleware = tuple(map(load_middleware, settings.middleware_paths))
    return dataclasses.replace(settings, middleware=middleware)


class Cores(msgspec.Struct, array_like=True, tag=True):
    """The second: where the cores listen, None for one that is dead. `ready` is what one of them said."""

    ready: Ready
    inboxes: list[str | None]


class CoreDown(msgspec.Struct, array_like=True, tag=True):
    core: int
    cause: str


class CoreUp(msgspec.Struct, array_like=True, tag=True):
    """A new core, in place of one that is down."""

    core: int
    ready: Ready
    inbox: str


class Report(msgspec.Struct, array_like=True, tag=True):
    """All that the process has counted so far, and how many HTTP requests it is answering. `number` is that of the
    `Collect` that asked for it, 0 for those that come by themselves."""

    number: int
    num_active: int
    counters: list[metrics.Counter]
    vectors: list[metrics.Vector]
    histograms: list[metrics.Histogram]


class Collect(msgspec.Struct, array_like=True, tag=True):
    """Asks for a `Report` of this number."""

    number: int


class Answer(msgspec.Struct, array_like=True, tag=True):
    """To an `Ask`: the text of `/metrics`, and how many HTTP requests are being answered, by all processes. To one for
    `counts`, these instead of the text."""

    number: int
    metrics: bytes
    num_active: int
    counts: Report | None = None


class Kept(msgspec.Struct, array_like=True, tag=True):
    """To a `Keep`, `Find` or `Forget`: what was found, and whether there was anything."""

    number: int
    response: StoredResponse | None
    was_there: bool


class Drain(msgspec.Struct, array_like=True, tag=True):
    """This signal has come: take no more requests, finish those that run, exit. At the second SIGINT, at once."""

    signal: int


class Leave(msgspec.Struct, array_like=True, tag=True):
    """Exit without finishing anything."""


class Served(msgspec.Struct, array_like=True, tag=True):
    """An adapter is there for requests that name it, from the folder `path`, or with None any more. From the process that was
    told so to the others, and to those that come later."""

    name: str
    path: str | None


type ToServer = (
    StartServer | Cores | CoreDown | CoreUp | Collect | Answer | Kept | Served | Drain | Leave
)


class Loaded(msgspec.Struct, array_like=True, tag=True):
    """The tokenizer is there: `Cores` may come."""


class Listening(msgspec.Struct, array_like=True, tag=True):
    """The process serves."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The process can't start; `is_bad_input` when what was asked for is at fault. It exits."""

    text: str
    is_bad_input: bool = False


class Ask(msgspec.Struct, array_like=True, tag=True):
    number: int
    counts: bool = False


class Keep(msgspec.Struct, array_like=True, tag=True):
    """A response of `/v1/responses`, for requests that may come to another process."""

    number: int
    id: str
    response: StoredResponse


class Find(msgspec.Struct, array_like=True, tag=True):
    number: int
    id: str


class Forget(msgspec.Struct, array_like=True, tag=True):
    number: int
    id: str


class Slept(msgspec.Struct, array_like=True, tag=True):
    """The cores do, at this level, or are awake at 0."""

    level: int


type FromServer = Loaded | Listening | Failed | Ask | Report | Keep | Find | Forget | Slept | Served
