"""Which of several cores gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np

from jaxinfer.config import DataParallelRouting
from jaxinfer.engine.ipc import Beat
from jaxinfer.engine.messages import EngineCoreRequest

WAITING_WEIGHT = 4
"""A request that waits weighs so much more than one that runs."""
OVERLOAD_FACTOR = 2
OVERLOAD_SLACK = 8
"""A core is overloaded when its load is more than so many times the least one, and this."""
_MAX_PREFIXES = 65_536


class LoadBalancer:
    """The load of a core is that of its requests, and of its KV cache: a full one weighs as much as a full batch
    (`max_num_seqs`) on top of the requests that fill it, as more of them would be preempted.

    With `routing` "prefix", a request goes to the core that last got the longest of its beginnings of one, two, four …
    blocks of `block_size` tokens, unless that is overloaded.
    """

    def __init__(self, routing: DataParallelRouting, block_size: int, max_num_seqs: int) -> None:
        self._by_prefix = routing == "prefix"
        self._block_bytes = 4 * block_size
        self._max_num_seqs = max_num_seqs
        self._core_of: OrderedDict[int, int] = OrderedDict()
        """By hash of a prefix; the one that was used last comes last."""
        self._turn = 0

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, Beat]) -> int:
        """One of the cores in `loads`, of which there is at least one. Equal ones take turns."""
        costs = {core: self._cost(load) for core, load in loads.items()}
        num_cores = max(costs) + 1
        chosen = min(costs, key=lambda core: (costs[core], (core - self._turn) % num_cores))
        self._turn = chosen + 1
        if self._by_prefix:
            prefixes = list(self._prefixes(request))
            limit = OVERLOAD_FACTOR * costs[chosen] + OVERLOAD_SLACK
            for prefix in reversed(prefixes):
                core = self._core_of.get(prefix)
                if core is not None and costs.get(core, np.inf) <= limit:
                    chosen = core
                    break
            self._remember(prefixes, chosen)
        return chosen

    def forget(self, core: int) -> None:
        """It has lost its cache."""
        for prefix in [p for p, known in self._core_of.items() if known == core]:
            del self._core_of[prefix]

    def _cost(self, load: Beat) -> float:
        requests = WAITING_WEIGHT * load.num_waiting + load.num_running
        return requests + self._max_num_seqs * load.kv_cache_usage

    def _prefixes(self, request: EngineCoreRequest) -> Iterator[int]:
        data = np.array(request.prompt_token_ids, np.int32).tobytes()
        length = self._block_bytes
        while length <= len(data):
            # Python's hash is keyed anew in each process; a collision costs a detour at most.
            yield hash((request.cache_salt, request.lora, data[:length]))
            length *= 2

    def _remember(self, prefixes: list[int], core: int) -> None:
        for prefix in prefixes:
            self._core_of[prefix] = core
            self._core_of.move_to_end(prefix)
        while len(self._core_of) > _MAX_PREFIXES:
            self._core_of.popitem(last=False)
