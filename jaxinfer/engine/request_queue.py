"""Requests that wait for a row: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from jaxinfer.config import SchedulingPolicy
from jaxinfer.engine.request import Request


class RequestQueue(Protocol):
    def add(self, request: Request) -> None:
        """Add a new request."""
        ...

    def put_back(self, request: Request) -> None:
        """Add a request that was taken out or preempted, at the place that it had."""
        ...

    def peek(self) -> Request:
        """The request that is next."""
        ...

    def pop(self) -> Request: ...

    def remove(self, requests: set[Request]) -> None:
        """Take out those of `requests` that wait here."""
        ...

    def victim(self, running: list[Request]) -> Request:
        """Which of the running requests, given in the order of admission, is preempted first."""
        ...

    def are_peers(self, one: Request, other: Request) -> bool:
        """Whether nothing but their arrival decides which of the two is next."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """In the order of arrival."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        # Nearly always the front: who was preempted or taken out came before most of those that wait.
        index = 0
        for other in self._requests:
            if other.arrival_index > request.arrival_index:
                break
            index += 1
        self._requests.insert(index, request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: set[Request]) -> None:
        self._requests = deque(r for r in self._requests if r not in requests)

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=lambda request: request.arrival_index)

    def are_peers(self, one: Request, other: Request) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """The lowest priority value first, the earlier arrival among equals."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, requests: set[Request]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in requests]
        heapq.heapify(self._heap)

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=lambda request: request.rank)

    def are_peers(self, one: Request, other: Request) -> bool:
        return one.priority == other.priority

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()
