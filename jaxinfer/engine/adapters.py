"""Which adapters there are, which of them the host's memory holds, and which the device's slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Protocol

from jaxinfer.config import LoRAConfig
from jaxinfer.engine.plan import AdapterLoad
from jaxinfer.engine.request import Request
from jaxinfer.lora_request import LoRARequest


class AdapterReader(Protocol):
    """See `plan.Executor`."""

    def read_adapter(self, path: str) -> str: ...

    def drop_adapter(self, key: str) -> None: ...


class Adapters:
    """Content is told apart by keys, so that a changed file is another adapter whatever it is called, and two names of
    the same one share a slot. An unfinished request keeps the content that it began with, also when its adapter is
    removed or replaced meanwhile; a running one keeps its slot. What goes first, on the host and on the device, is what
    was used longest ago.
    """

    def __init__(
        self, config: LoRAConfig | None, reader: AdapterReader | None, max_overtakes: int
    ) -> None:
        """Requests that wait for a slot are overtaken by at most `max_overtakes` others that have one. Without a `config`
        there are no adapters."""
        self._max_loras = 0 if config is None else config.max_loras
        self._max_cpu_loras = 0 if config is None else config.max_cpu_loras
        self._reader = reader if config is not None else None
        self._max_overtakes = max_overtakes
        self._known: dict[int, tuple[LoRARequest, str]] = {}
        self._pinned: set[int] = set()
        self._on_host: OrderedDict[str, None] = OrderedDict()
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(self._max_loras, 0, -1))
        self._users: Counter[str] = Counter()
        """Running requests, by key."""
        self._blocked: list[Request] = []
        self._loads: list[AdapterLoad] = []
        self._unfinished: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    # ---- which there are ---------------------------------------------------------------------------------------------

    def check_enabled(self) -> None:
        """Raises `ValueError` where the engine has no adapters."""
        self._reading()

    def _reading(self) -> AdapterReader:
        if self._reader is None:
            raise ValueError("lora_request needs an engine with enable_lora=True.")
        return self._reader

    def add(self, adapter: LoRARequest) -> str:
        """Read it, again if it is known, for requests from now on. Returns its key. Raises `ValueError` as
        `Executor.read_adapter`; then what was known stays."""
        key = self._reading().read_adapter(adapter.lora_path)
        self._hold(key)
        self._known[adapter.lora_int_id] = adapter, key
        return key

    def remove(self, number: int) -> bool:
        """For requests from now on. False: there was none of this `lora_int_id`."""
        self.check_enabled()
        self._pinned.discard(number)
        return self._known.pop(number, None) is not None

    def pin(self, number: int) -> bool:
        """Keep it on the host, and in a slot once it is there. Raises `ValueError` for one that isn't known, and where
        no slot would be left for others."""
        self.check_enabled()
        if number not in self._known:
            raise ValueError(f"lora_int_id {number} is not loaded.")
        if len(self._pinned | {number}) >= self._max_loras:
            raise ValueError(
                f"Of max_loras ({self._max_loras}) adapters, at most {self._max_loras - 1} can be pinned."
            )
        self._pinned.add(number)
        return True

    def known(self) -> list[LoRARequest]:
        self.check_enabled()
        return [adapter for adapter, _ in self._known.values()]

    def key_of(self, adapter: LoRARequest) -> str:
        """Of the adapter as it is known, or as it is read now. Raises as `add`."""
        known = self._known.get(adapter.lora_int_id)
        if known is not None and known[0].lora_path == adapter.lora_path:
            return known[1]
        return self.add(adapter)

    # ---- the host's memory -------------------------------------------------------------------------------------------

    def _hold(self, key: str) -> None:
        self._on_host[key] = None
        self._on_host.move_to_end(key)
        pinned = self._pinned_keys()
        for other in list(self._on_host):
            if len(self._on_host) <= self._max_cpu_loras:
                break
            if other != key and other not in pinned:
                del self._on_host[other]
                self._reading().drop_adapter(other)

    def _pinned_keys(self) -> set[str]:
        return {self._known[number][1] for number in self._pinned}

    # ---- the device's slots ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._blocked = []

    def may_enter(self, request: Request) -> bool:
        """Whether a waiting request could have a slot in the step that is being planned. Those that can't are asked
        first in the next."""
        key = request.adapter
        if key is None:
            return True
        # Whoever enters keeps a slot that somebody may wait for.
        if any(other.num_overtaken >= self._max_overtakes for other in self._blocked):
            return False
        if key in self._slots or self._free or self._victim() is not None:
            return True
        self._blocked.append(request)
        return False

    def prepare(self, request: Request) -> None:
        """Have the host hold what `enter` will load. Raises `ValueError` where that can't be read again, or has changed
        since the request came."""
        if request.adapter is None or request.adapter in self._slots:
            return
        if request.adapter not in self._on_host:
            assert request.lora is not None
            key = self._reading().read_adapter(request.lora.lora_path)
            self._hold(key)
            if key != request.adapter:
                raise ValueError(
                    f"The adapter in {request.lora.lora_path} has changed since the request came."
                )
        self._on_host.move_to_end(request.adapter)

    def enter(self, request: Request) -> None:
        """The request runs from the step on that is being planned."""
        key = request.adapter
        if key is None:
            return
        for other in self._blocked:
            other.num_overtaken += 1
        if key not in self._slots:
            if not self._free:
                victim = self._victim()
                assert victim is not None
                self._free.append(self._slots.pop(victim))
            self._slots[key] = self._free.pop()
            self._loads.append(AdapterLoad(self._slots[key], key))
        self._slots.move_to_end(key)
        self._users[key] += 1
        request.adapter_slot = self._slots[key]
        self._count(self._running, request, 1)

    def leave(self, request: Request) -> None:
        """It doesn't run any more."""
        if request.adapter is not None:
            self._users[request.adapter] -= 1
            self._count(self._running, request, -1)

    def take_loads(self) -> list[AdapterLoad]:
        """For the step that is being planned."""
        loads, self._loads = self._loads, []
        return loads

    def forget_slots(self) -> None:
        """The device has lost them; nothing runs."""
        self._slots.clear()
        self._free = list(range(self._max_loras, 0, -1))

    def _victim(self) -> str | None:
        pinned = self._pinned_keys()
        return next((k for k in self._slots if not self._users[k] and k not in pinned), None)

    # ---- counts ------------------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        self._count(self._unfinished, request, 1)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._count(self._unfinished, request, -1)

    @property
    def running(self) -> list[str]:
        """Names of the adapters that requests run with."""
        return sorted(self._running)

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters that requests wait with."""
        return sorted(n for n, count in self._unfinished.items() if count > self._running[n])

    def _count(self, counter: Counter[str], request: Request, change: int) -> None:
        if request.lora is None:
            return
        name = request.lora.lora_name
        counter[name] += change
        if not counter[name]:
            del counter[name]
