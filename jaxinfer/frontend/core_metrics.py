"""The numbers of several engine cores, each by itself: of its steps, and of the requests that it got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jaxinfer import metrics
from jaxinfer.config import EngineConfig
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.frontend.metrics import EngineMetrics
from jaxinfer.frontend.processor import PreparedRequest
from jaxinfer.outputs import RequestOutput


class CoreMetrics:
    """An `EngineMetrics` per core; `num_blocks` are those of their KV caches, where they are known. `num_open` says how
    much a core has to do, where this doesn't hear of requests."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: Sequence[int | None],
        num_open: Callable[[int], int] | None = None,
    ) -> None:
        self.on_slept: Callable[[int], None] | None = None
        """Hears of it where others have to know."""
        self._num_open = [0] * len(num_blocks)
        self.cores = [
            EngineMetrics(
                config, partial(num_open or self._num_open.__getitem__, core), blocks, core
            )
            for core, blocks in enumerate(num_blocks)
        ]

    @property
    def model_name(self) -> str:
        return self.cores[0].model_name

    @model_name.setter
    def model_name(self, name: str) -> None:
        for core in self.cores:
            core.model_name = name

    def slept(self, level: int) -> None:
        """All cores, at this level; 0: they are awake."""
        for core in self.cores:
            core.slept(level)
        if self.on_slept is not None:
            self.on_slept(level)

    def turned_away(self, limit: str) -> None:
        """A request that no core got; counted with the first."""
        self.cores[0].turned_away(limit)

    def request_added(self, request: PreparedRequest) -> None:
        self._num_open[request.core] += 1
        self.cores[request.core].request_added(request)

    def request_output(self, request: PreparedRequest, output: RequestOutput) -> None:
        if output.finished:
            self._num_open[request.core] -= 1
        self.cores[request.core].request_output(request, output)

    def step(self, outputs: EngineCoreOutputs) -> None:
        self.cores[outputs.core].step(outputs)

    def snapshot(self) -> list[metrics.Metric]:
        return [metric for core in self.cores for metric in core.snapshot()]
