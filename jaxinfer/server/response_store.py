"""Responses that later requests may go on from, as many as there is room for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, Self

from jaxinfer.server.errors import encode_json


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`messages`: the whole conversation as JSON, up to the response's own."""

    body: bytes
    messages: bytes

    @classmethod
    def of(cls, body: dict[str, Any], messages: list[dict[str, Any]]) -> Self:
        return cls(encode_json(body), encode_json(messages))

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages)


class StoredResponses(Protocol):
    """Wherever they are: in this process, or with the supervisor of several."""

    async def keep(self, id: str, stored: StoredResponse) -> None:
        """It is there when this returns."""
        ...

    async def get(self, id: str) -> StoredResponse | None: ...

    async def remove(self, id: str) -> bool:
        """Whether it was there."""
        ...


class ResponseStore:
    """Forgets what was not used for the longest time when there are more than `max_count` or `max_bytes` together."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, id: str, body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        self.keep(id, StoredResponse.of(body, messages))

    def keep(self, id: str, stored: StoredResponse) -> None:
        self.remove(id)
        self._responses[id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_count:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, id: str) -> StoredResponse | None:
        stored = self._responses.get(id)
        if stored is not None:
            self._responses.move_to_end(id)
        return stored

    def remove(self, id: str) -> bool:
        """Whether it was there."""
        stored = self._responses.pop(id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored is not None


class OwnResponses:
    """`StoredResponses` of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def keep(self, id: str, stored: StoredResponse) -> None:
        self._store.keep(id, stored)

    async def get(self, id: str) -> StoredResponse | None:
        return self._store.get(id)

    async def remove(self, id: str) -> bool:
        return self._store.remove(id)
