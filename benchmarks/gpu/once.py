"""Things made once by whoever asks first, while others wait: programs that several cases and threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any


class Once:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned, or raised, when `key` was first asked for."""
        with self._lock:
            mine = key not in self._made
            future = self._made.setdefault(key, Future())
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()
