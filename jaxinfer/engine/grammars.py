"""Requests whose output follows a grammar: compiled beside the host loop, advanced with each token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from jaxinfer.engine.plan import Words
from jaxinfer.engine.request import Request

_THREADS = 2
_CACHED = 128


class Matcher(Protocol):
    """A grammar, and where one output stands in it."""

    def copy(self) -> Matcher:
        """One that goes its own way from here."""
        ...

    def accept(self, token: int) -> str | None:
        """Go on by one token. An error's text when it can't follow, or the grammar became too large to follow."""
        ...

    def num_valid(self, tokens: list[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens that must follow, as far as there is no choice."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the end of the sequence has been accepted: nothing may follow."""
        ...


class GrammarBackend(Protocol):
    def compile(self, grammar: str) -> Matcher:
        """Raises `ValueError`. Takes up to seconds; called in threads."""
        ...

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], words: Words) -> None:
        """Write the tokens that may follow in each matcher to the row of `words` [N, ceil(V / 32)] beside it."""
        ...


class GrammarQueue:
    """Requests that wait for their grammars. Equal grammars are compiled once and kept for later requests."""

    def __init__(self, backend: GrammarBackend | None) -> None:
        self._backend = backend
        self._waiting: dict[Request, Future[Matcher]] = {}
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def check_available(self) -> None:
        """Raises `ValueError` when this engine has no grammars."""
        if self._backend is None:
            raise ValueError("structured_outputs need a tokenizer, which this engine has not.")

    def add(self, request: Request, grammar: str) -> None:
        assert self._backend is not None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._pool.submit(self._backend.compile, grammar)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        self._waiting[request] = future

    def remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._waiting.pop(request, None)

    def wait(self, timeout: float) -> None:
        """Until one is compiled, at most `timeout` seconds."""
        wait(self._waiting.values(), timeout, FIRST_COMPLETED)

    def take_compiled(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that have got their matchers, in the order of their arrival, and those whose grammars failed, with
        the error's text."""
        done = [request for request, future in self._waiting.items() if future.done()]
        ready, failed = [], []
        for request in done:
            future = self._waiting.pop(request)
            if (error := future.exception()) is not None:
                failed.append((request, f"structured_outputs: {error}"))
            else:
                request.follow(future.result().copy())
                ready.append(request)
        return ready, failed

    def shutdown(self) -> None:
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
