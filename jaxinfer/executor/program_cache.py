"""Ahead-of-time compiled programs, held by key, and a count of every compilation.

After warm-up nothing should compile: a compilation in the middle of serving stalls every running request for seconds.
`CompileGuard` counts at XLA's door, so that a stray `jnp` call on the host is seen as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

CompileFn = Callable[[], jax.stages.Compiled]


def use_persistent_cache(directory: str | None) -> None:
    """Let XLA keep what it compiles in `directory`, by default `$JAXINFER_CACHE/xla` (~/.cache/jaxinfer/xla).

    A cache that the process has already chosen (JAX_COMPILATION_CACHE_DIR or `jax.config`) stays, unless `directory`
    asks for another.
    """
    if directory is None:
        if jax.config.jax_compilation_cache_dir is not None:
            return
        root = os.environ.get("JAXINFER_CACHE", "~/.cache/jaxinfer")
        directory = str(Path(root).expanduser() / "xla")
    jax.config.update("jax_compilation_cache_dir", directory)
    # Every program of a step is worth keeping: a second start then compiles none of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompileGuard:
    """Counts the programs that XLA compiled (or read from its persistent cache) in this process."""

    _total = 0
    _lock = threading.Lock()
    _listening = False

    def __init__(self) -> None:
        with CompileGuard._lock:
            if not CompileGuard._listening:
                jax.monitoring.register_event_duration_secs_listener(CompileGuard._on_event)
                CompileGuard._listening = True
        self.reset()

    @staticmethod
    def _on_event(event: str, duration: float, **_: str | int) -> None:
        if event == _BACKEND_COMPILE_EVENT:
            with CompileGuard._lock:
                CompileGuard._total += 1

    def reset(self) -> None:
        """Count from here: warm-up is over."""
        self._start = CompileGuard._total

    @property
    def count(self) -> int:
        return CompileGuard._total - self._start


class ProgramCache:
    """Compiled programs by key, each compiled once, by whoever asks first. `on_wait` is called by whoever `get`s one
    that isn't there yet, before it waits."""

    def __init__(self, num_threads: int):
        self.on_wait: Callable[[], None] | None = None
        self._programs: dict[Hashable, Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")

    def get(self, key: Hashable, compile_fn: CompileFn) -> jax.stages.Compiled:
        """The program of `key`; compiles it (or waits for whoever does) when it isn't there yet."""
        future = self._programs.get(key)
        if future is not None and future.done():
            return future.result()
        if self.on_wait is not None:
            self.on_wait()
        with self._lock:
            future = self._programs.get(key)
            mine = future is None
            if mine:
                future = self._programs[key] = Future()
        if mine:
            self._run(key, compile_fn, future)
        return future.result()

    def start(self, key: Hashable, compile_fn: CompileFn) -> None:
        """Begin to compile `key` in the background, unless somebody has."""
        with self._lock:
            if key in self._programs:
                return
            future = self._programs[key] = Future()
        self._pool.submit(self._run, key, compile_fn, future)

    def compile_all(
        self,
        jobs: Iterable[tuple[Hashable, CompileFn]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile all jobs in the thread pool and wait; `progress(done, total)` after each."""
        jobs = list(jobs)
        for key, compile_fn in jobs:
            self.start(key, compile_fn)
        for done, (key, _) in enumerate(jobs, 1):
            self._programs[key].result()
            if progress is not None:
                progress(done, len(jobs))

    def _run(self, key: Hashable, compile_fn: CompileFn, future: Future) -> None:
        start = time.perf_counter()
        try:
            program = compile_fn()
        except BaseException as error:
            with self._lock:
                del self._programs[key]
            future.set_exception(error)
            return
        logger.debug("compiled %s in %.2f s", key, time.perf_counter() - start)
        future.set_result(program)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
