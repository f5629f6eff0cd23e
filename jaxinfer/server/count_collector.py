"""The supervisor's answers to those who ask for `/metrics` or `/load`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.server.api_process import ApiServer
from jaxinfer.server.control import Answer, Ask, Collect, Report
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.shared_metrics import SharedMetrics, report

logger = logging.getLogger(__name__)

_COLLECT_SECONDS = 2.0
"""How long an API server process may take to report; after that, what it reported last counts."""


class CountCollector:
    """Has the API server processes report, and answers with the sums. `servers`: those that there are."""

    def __init__(
        self,
        shared: SharedMetrics,
        check_health: Callable[[int], None],
        servers: Sequence[ApiServer | None],
    ) -> None:
        self._shared = shared
        self._text = Metrics(shared, check_health, alone=False)
        self._servers = servers
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}

    def add(self, server: ApiServer, message: Report) -> None:
        self._shared.reports[server.client] = message
        if (question := self._questions.get(message.number)) is not None:
            question.answered(server.client)

    def ended(self, server: ApiServer) -> None:
        for question in self._questions.values():
            question.answered(server.client)

    async def answer(self, asker: ApiServer, asked: Ask) -> None:
        listening = [s for s in self._servers if s is not None and s.is_listening]
        number = next(self._numbers)
        question = self._questions[number] = _Question({s.client for s in listening})
        for server in listening:
            server.send(Collect(number))
        try:
            await asyncio.wait_for(question.done.wait(), _COLLECT_SECONDS)
        except TimeoutError:
            logger.warning("%d API server processes don't report.", len(question.waiting))
        finally:
            del self._questions[number]
        alive = {s.client for s in self._servers if s is not None}
        reports = self._shared.reports.items()
        num_active = sum(r.num_active for client, r in reports if client in alive)
        if asked.counts:
            counts = report(0, num_active, self._shared.snapshot())
            asker.send(Answer(asked.number, b"", num_active, counts))
        else:
            asker.send(Answer(asked.number, self._text.render(), num_active))


@dataclass(slots=True)
class _Question:
    """Which clients haven't answered yet."""

    waiting: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, client: int) -> None:
        self.waiting.discard(client)
        if not self.waiting:
            self.done.set()
