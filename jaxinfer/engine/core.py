"""The engine core: schedules, launches, and reads back, one step ahead of the device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from jaxinfer.config import EngineConfig
from jaxinfer.engine.anatomy import take_anatomy
from jaxinfer.engine.cache_demand import CacheDemand
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.grammars import GrammarBackend, GrammarQueue
from jaxinfer.engine.jump_ahead import forced_runs
from jaxinfer.engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
)
from jaxinfer.engine.plan import SLEEP_TAGS, Executor, StepHandle
from jaxinfer.engine.request import check_request
from jaxinfer.engine.scheduled_step import ScheduledStep
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stats import HostSeconds, SchedulerStats
from jaxinfer.engine.step_log import StepLog
from jaxinfer.engine.token_masks import TokenMaskBuilder
from jaxinfer.engine.work_meter import WorkMeter
from jaxinfer.lora_request import LoRARequest

logger = logging.getLogger(__name__)

NO_TOKEN_LEFT = "No token may be sampled: allowed_token_ids, bad_words, min_tokens and structured_outputs together exclude all of them."
CALLS = (
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "is_sleeping",
    "anatomy",
    "add_lora",
    "remove_lora",
    "pin_lora",
    "list_loras",
)
_GRAMMAR_WAIT_SECONDS = 0.01
"""How long a step waits when there is nothing to do but compile: those who step the core want to pass on messages."""
_MEMORY_SECONDS = 1.0
"""How often the device is asked for its memory."""


class EngineCore:
    """Serves requests with one executor. Not thread-safe; requests enter and leave between steps.

    With `async_scheduling`, a step is launched before the tokens of the one before it are read; without, and under
    speculation, whose guesses depend on them, each step is read before the next is planned. The tokens are the same.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, grammars: GrammarBackend | None = None
    ) -> None:
        _check_cache(config, executor.num_blocks)
        self._config = config
        self._executor = executor
        self.scheduler = Scheduler(config, executor.num_blocks, executor)
        self._grammars = GrammarQueue(grammars)
        self._masks = TokenMaskBuilder(self.scheduler.table, grammars)
        overlap = config.scheduler.async_scheduling and config.speculative is None
        self._depth = 2 if overlap else 1
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._outputs = EngineCoreOutputs()
        self._failed: list[FinishedRequest] = []
        self._step_log = StepLog()
        self._work = WorkMeter(executor.step_costs)
        self._seconds = HostSeconds()
        self._next_memory = 0.0
        self._cause_of_death: BaseException | None = None

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, the padding block too."""
        return self._executor.num_blocks

    def check_request(self, message: EngineCoreRequest) -> None:
        """Raises `ValueError` for a request that can't be served, `EngineDeadError` when none can. Thread-safe."""
        self.check_alive()
        check_request(message, self._config.model)
        if message.grammar is not None:
            self._grammars.check_available()
        if message.lora is not None:
            self.scheduler.adapters.check_enabled()
        if self._executor.asleep:
            raise ValueError("The engine sleeps: wake it up before you send requests.")

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises as `check_request`, and `ValueError` when its id is in use or its adapter can't be
        read."""
        self.check_request(message)
        if message.request_id in self.scheduler.requests:
            raise ValueError(f"request_id {message.request_id!r} is already in use.")
        if message.grammar is None:
            self.scheduler.add_request(message)
            return
        self._grammars.add(self.scheduler.add_request(message), message.grammar)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once; unknown ids are ignored. Nothing more is reported of them."""
        requests = self.scheduler.requests
        ended = [requests[i] for i in request_ids if i in requests]
        self._grammars.remove(ended)
        self.scheduler.finish(ended)

    def reset_prefix_cache(self) -> None:
        """Requests that are admitted from now on read nothing from the prefix cache that was computed before."""
        self.scheduler.prefix_cache.reset()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory away until `wake_up`: the KV cache's, and the weights'. At level 1 the host keeps the
        weights, at level 2 nobody does. Raises `ValueError` for another level, and while requests are unfinished."""
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}.")
        if self.has_unfinished():
            number = len(self.scheduler.requests)
            raise ValueError(f"The engine can't sleep: {number} requests are unfinished.")
        while self._in_flight:
            self._read_oldest()
        self.reset_prefix_cache()
        self._executor.sleep(level)
        self.scheduler.adapters.forget_slots()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `sleep` gave away: "weights" (read from the checkpoint again, after level 2), "kv_cache", or
        both (None). Raises `ValueError` for other tags."""
        unknown = set(tags or ()) - set(SLEEP_TAGS)
        if unknown:
            raise ValueError(f"tags may hold {SLEEP_TAGS}, got {sorted(unknown)}.")
        self._executor.wake_up(SLEEP_TAGS if tags is None else tags)

    def is_sleeping(self) -> bool:
        return bool(self._executor.asleep)

    def anatomy(self) -> dict[str, Any]:
        """`take_anatomy`, as plain data."""
        picture = take_anatomy(self.scheduler, self._step_log, self.is_sleeping())
        made: dict[str, Any] = msgspec.to_builtins(picture)
        return made

    def add_lora(self, lora_name: str, lora_int_id: int, lora_path: str) -> bool:
        """Read an adapter, again if it is known, for requests from now on. Raises `ValueError` where it doesn't fit."""
        self.scheduler.adapters.add(LoRARequest(lora_name, lora_int_id, lora_path))
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; unfinished requests go on with it. False: it wasn't known."""
        return self.scheduler.adapters.remove(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter on the host and in its slot. Raises `ValueError` for one that isn't known."""
        return self.scheduler.adapters.pin(lora_int_id)

    def list_loras(self) -> list[tuple[str, int, str]]:
        """The fields of the `LoRARequest` of each adapter that is known."""
        known = self.scheduler.adapters.known()
        return [(a.lora_name, a.lora_int_id, a.lora_path) for a in known]

    def call(self, name: str, *arguments: Any) -> Any:
        """One of `CALLS` by its name, for clients that live elsewhere. Results are plain data."""
        if name not in CALLS:
            raise ValueError(f"The engine core has no call {name!r}; it has {CALLS}.")
        self.check_alive()
        return getattr(self, name)(*arguments)

    def on_compile(self, callback: Callable[[], None]) -> None:
        """Called before a step waits for a program to be compiled, in the thread that steps."""
        self._executor.on_compile = callback

    def load(self) -> tuple[int, int, float]:
        """Requests that run and that wait, and the used share of the KV cache."""
        scheduler = self.scheduler
        num_running = len(scheduler.running)
        return num_running, len(scheduler.requests) - num_running, scheduler.kv.pool.usage

    def has_unfinished(self) -> bool:
        """Whether a step would report anything."""
        return bool(self.scheduler.requests or self._failed)

    def step(self) -> EngineCoreOutputs:
        """Launch the next step and return the outputs of the oldest one in flight (none while there is only one).

        When anything in it raises, all requests end with an error, which the outputs say, and the core is dead: the
        next call raises `EngineDeadError`.
        """
        self.check_alive()
        self._outputs = EngineCoreOutputs()
        try:
            self._step()
        except Exception as error:
            logger.exception("A step failed; all requests end with an error.")
            self._die(error)
        if self._failed:
            self._outputs.finished += self._failed
            self._failed = []
        return self._outputs

    def shutdown(self) -> None:
        """Drop what is unfinished and release the device."""
        self.scheduler.finish(list(self.scheduler.requests.values()))
        self._in_flight.clear()
        self._grammars.shutdown()
        self._executor.shutdown()

    def _step(self) -> None:
        if len(self._grammars):
            self._start_compiled()
        num_in_flight = len(self._in_flight)
        launched = num_in_flight < self._depth and self._launch()
        if not launched and not num_in_flight and self.scheduler.requests:
            if len(self._grammars):
                self._grammars.wait(_GRAMMAR_WAIT_SECONDS)
                return
            raise RuntimeError(
                f"{len(self.scheduler.requests)} requests are unfinished, but none can be scheduled."
            )
        if len(self._in_flight) == self._depth or (self._in_flight and not launched):
            self._read_oldest()

    def _start_compiled(self) -> None:
        ready, failed = self._grammars.take_compiled()
        self.scheduler.start(ready)
        self.scheduler.finish(request for request, _ in failed)
        self._failed += [
            FinishedRequest(r.request_id, FinishReason.ERROR, text, True) for r, text in failed
        ]

    def _end_refused(self) -> None:
        refused, self.scheduler.refused = self.scheduler.refused, []
        self._failed += [
            FinishedRequest(r.request_id, FinishReason.ERROR, text, True) for r, text in refused
        ]
        self.scheduler.finish(request for request, _ in refused)

    def _launch(self) -> bool:
        """Plan a step and start it on the device. False when there is nothing to compute."""
        start = time.perf_counter()
        reading = 0.0
        try:
            step = self.scheduler.schedule()
            self._end_refused()
            if step is None:
                return False
            planned = time.perf_counter()
            self._executor.execute_model(step.plan)
            if self._masks.needs_output(step):
                reading = time.perf_counter()
                self._read_oldest()
                reading = time.perf_counter() - reading
            mask, stuck = self._masks.build(step)
            self._in_flight.append((step, self._executor.sample_tokens(mask)))
            if len(step.batch.rows) <= self._config.scheduler.jump_ahead_max_rows:
                self.scheduler.force(step, forced_runs(step, mask, self.scheduler.table))
        except KeyboardInterrupt as error:
            # Nobody knows how much of the step has begun.
            self._die(error)
            raise
        self._seconds.schedule += planned - start
        self._seconds.launch += time.perf_counter() - planned - reading
        self.scheduler.finish(stuck)
        self._failed += [
            FinishedRequest(r.request_id, FinishReason.ERROR, NO_TOKEN_LEFT, True) for r in stuck
        ]
        return True

    def _read_oldest(self) -> None:
        step, handle = self._in_flight[0]
        # An interrupt may end the wait: the step stays in flight until its result is here.
        start = time.perf_counter()
        result = handle.result()
        waited = time.perf_counter()
        self._in_flight.popleft()
        self._outputs = self.scheduler.update(step, result)
        self._step_log.add(step, self._outputs, self.scheduler.table)
        self._seconds.wait += waited - start
        if self._outputs.stats is not None:
            self._complete(self._outputs.stats, step, waited)

    def _complete(self, stats: SchedulerStats, step: ScheduledStep, waited: float) -> None:
        """With what the scheduler doesn't know. `waited`: when the step's result was here."""
        stats.num_compilations = self._executor.num_compilations
        stats.work = self._work.step(step, stats.num_scheduled_tokens)
        now = time.perf_counter()
        if now >= self._next_memory:
            self._next_memory = now + _MEMORY_SECONDS
            stats.memory = self._executor.device_memory()
        self._seconds.update += now - waited
        stats.seconds, self._seconds = self._seconds, HostSeconds()

    def check_alive(self) -> None:
        """Raises `EngineDeadError` when a step has failed. Thread-safe."""
        if self._cause_of_death is not None:
            raise EngineDeadError(
                f"The engine core has failed: {_text(self._cause_of_death)}"
            ) from self._cause_of_death

    def _die(self, error: BaseException) -> None:
        self._cause_of_death = error
        unfinished = list(self.scheduler.requests.values())
        self._failed += [
            FinishedRequest(r.request_id, FinishReason.ERROR, _text(error)) for r in unfinished
        ]
        self._grammars.remove(unfinished)
        self.scheduler.finish(unfinished)
        self._in_flight.clear()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check_cache(config: EngineConfig, num_blocks: int) -> None:
    demand, columns, usable = (
        CacheDemand.of(config),
        config.max_blocks_per_seq,
        max(num_blocks - 1, 0),
    )
    needed = demand.blocks(1, columns)
    if usable < needed:
        block_size = config.cache.block_size
        fitting = demand.most_columns(usable, columns)
        shorter = (
            f"Decrease max_model_len to at most {fitting * block_size}, or increase"
            if fitting
            else "Increase"
        )
        raise ValueError(
            f"The KV cache is too small for one request of max_model_len ({config.model.max_model_len} tokens): it "
            f"needs {needed} blocks of {block_size} tokens, and there are {usable} (and one for padding). {shorter} "
            "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override."
        )
