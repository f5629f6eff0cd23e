import threading

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.executor.program_cache import CompileGuard, ProgramCache


def compiled(n):
    return jax.jit(lambda x: x * n + 1).lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile()


def test_each_program_is_compiled_once_by_whoever_asks_first():
    cache, calls, entered = ProgramCache(2), [], threading.Event()

    def compile_fn():
        calls.append(threading.current_thread().name)
        entered.set()
        return compiled(3)

    cache.start("key", compile_fn)
    entered.wait(30)
    programs = [cache.get("key", compile_fn) for _ in range(3)]
    assert len(calls) == 1 and calls[0].startswith("compile")
    assert programs[0] is programs[2]
    cache.shutdown()


def test_compile_all_reports_progress_and_fills_the_cache():
    cache, seen = ProgramCache(2), []
    jobs = [(n, lambda n=n: compiled(n)) for n in (4, 5, 6)]
    cache.compile_all(jobs, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]

    def never():
        raise AssertionError("compiled twice")

    assert cache.get(5, never)(jnp.ones(5)).tolist() == [6.0] * 5
    cache.shutdown()


def test_a_failed_compilation_is_raised_and_may_be_tried_again():
    cache = ProgramCache(1)

    def fails():
        raise RuntimeError("no such shape")

    with pytest.raises(RuntimeError, match="no such shape"):
        cache.get("key", fails)
    assert cache.get("key", lambda: compiled(7)) is not None
    cache.shutdown()


def test_guard_counts_compilations_wherever_they_come_from():
    x = jnp.arange(11.0)
    guard = CompileGuard()
    compiled(12)
    assert guard.count == 1
    double = jax.jit(lambda x: x * 2)
    double(x)
    double(x)
    assert guard.count == 2
    guard.reset()
    double(x)
    assert guard.count == 0
