"""In which order waiting requests are asked whether they may enter the step that is being planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jaxinfer.engine.request import Request
from jaxinfer.engine.request_queue import RequestQueue

WINDOW = 64
"""How many waiting requests a step may pass over, or compare: all of it is done anew in the next step."""


class AdmissionOrder(Protocol):
    """For one step. Those that it gave and that were not taken are back in their places after `close`."""

    def next(self) -> Request | None:
        """A request that wasn't asked yet, None when no more may be."""
        ...

    def take(self, request: Request) -> None:
        """The request that `next` gave last is admitted."""
        ...

    def close(self) -> None: ...


class QueueOrder:
    """As they stand in the queue."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._passed: list[Request] = []

    def next(self) -> Request | None:
        if not len(self._queue) or len(self._passed) == WINDOW:
            return None
        self._passed.append(self._queue.pop())
        return self._passed[-1]

    def take(self, request: Request) -> None:
        self._passed.pop()

    def close(self) -> None:
        for request in reversed(self._passed):
            self._queue.put_back(request)


class CacheAwareOrder:
    """Of the first `WINDOW` requests in the queue, those of one priority, the longest cached prefix first.

    Nobody is overtaken more than `max_overtakes` times: behind a request that has been, nobody is given before it.
    """

    def __init__(
        self, queue: RequestQueue, num_cached: Callable[[Request], int], max_overtakes: int
    ) -> None:
        self._queue = queue
        self._max_overtakes = max_overtakes
        self._waiting: list[Request] = []
        while len(queue) and len(self._waiting) < WINDOW:
            if self._waiting and not queue.are_peers(self._waiting[0], queue.peek()):
                break
            self._waiting.append(queue.pop())
        self._untried = {request: num_cached(request) for request in self._waiting}

    def next(self) -> Request | None:
        best: Request | None = None
        for request in self._waiting:
            if request in self._untried and (
                best is None or self._untried[request] > self._untried[best]
            ):
                best = request
            if request.num_overtaken >= self._max_overtakes:
                break
        if best is not None:
            del self._untried[best]
        return best

    def take(self, request: Request) -> None:
        index = self._waiting.index(request)
        for other in self._waiting[:index]:
            other.num_overtaken += 1
        del self._waiting[index]

    def close(self) -> None:
        for request in reversed(self._waiting):
            self._queue.put_back(request)
