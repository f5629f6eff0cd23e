"""What the GPU benchmark counts: floors, targets, busy time, and the oracle that kernels are held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks.gpu import oracle
from benchmarks.gpu.batches import (
    Heads,
    attention_bytes,
    attention_flops,
    host_random,
    make_batch,
    random_array,
)
from benchmarks.gpu.busy import measure_busy, merge
from benchmarks.gpu.cases import Context
from benchmarks.gpu.once import Once
from benchmarks.gpu.prefill import floors
from benchmarks.gpu.results import Result
from benchmarks.gpu.targets import TARGETS, Target
from benchmarks.gpu.timing import time_calls


def test_attention_floors_count_what_causality_leaves():
    heads = Heads(kv=2, group=3, size=16)
    rows = [(5, 5), (9, 2), (4, 1)]
    pairs = sum(range(1, 6)) + 8 + 9 + 4
    assert attention_flops(heads, rows) == pairs * 6 * 16 * 4
    cache = (5 + 9 + 4) * 2 * 2 * 16
    assert attention_bytes(heads, rows) == cache * 2 + 8 * 6 * 16 * 2 * 2
    assert attention_bytes(heads, rows, itemsize=1) == cache + 8 * 6 * 16 * 2 * 2


def test_the_longer_floor_counts():
    heads, context = Heads(8, 4, 128), Context(bandwidth=1e12, matmul=1e15)
    decode = floors(context, heads, [(4096, 1)], seconds=1.0)
    assert decode["of"] == "copy bandwidth"
    assert decode["fraction"] == pytest.approx(attention_bytes(heads, [(4096, 1)]) / 1e12)
    prefill = floors(context, heads, [(4096, 4096)], seconds=1.0)
    assert prefill["of"] == "matmul peak"
    assert prefill["fraction"] == pytest.approx(attention_flops(heads, [(4096, 4096)]) / 1e15)


def test_batches_hand_out_every_page_once_while_there_are_enough():
    sizes = {"num_pages": 33, "page_size": 4, "pages_per_row": 9}
    batch = make_batch([(30, 1), (33, 2), (4, 4)], num_rows=5, num_tokens=12, **sizes)
    used = [batch.block_tables[r, :n] for r, n in enumerate((8, 9, 1))]
    pages = np.concatenate(used).tolist()
    assert len(set(pages)) == 18 and 0 not in pages
    assert batch.seq_lens.tolist() == [30, 33, 4, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 3, 7, 7, 7]
    assert batch.rows == [(30, 1), (33, 2), (4, 4)]
    other = make_batch([(30, 1)], first_page=18, **sizes)
    assert not set(other.block_tables[0, :8].tolist()) & set(pages)
    many = make_batch([(36, 1)] * 8, **sizes)
    assert (many.block_tables > 0).all() and (many.block_tables < 33).all()
    assert all(len(set(row)) == 9 for row in many.block_tables.tolist())


def test_oracle_agrees_with_attention_written_differently():
    heads = Heads(2, 2, 8)
    rng = np.random.default_rng(0)
    batch = make_batch([(11, 4), (6, 1)], num_pages=9, page_size=4, pages_per_row=3)
    q = rng.normal(size=(5, heads.queries, heads.size))
    pages = tuple(rng.normal(size=(9, heads.kv, 4, heads.size)) for _ in range(2))
    sinks = rng.normal(size=heads.queries)
    scales = (np.array([0.5, 2.0]), np.array([3.0, 0.1]))
    options = oracle.Options(0.3, 5, 2.0, True, sinks, scales)
    out, lse = oracle.attention(
        q, pages, batch.block_tables, batch.seq_lens, batch.query_start_loc, options,
        tokens=np.array([0, 3, 4]), kv_heads=np.array([1]),
    )  # fmt: skip
    for i, (row, position, token) in enumerate(((0, 7, 0), (0, 10, 3), (1, 5, 4))):
        for g in range(heads.group):
            k, v = (
                np.concatenate([array[p, 1] for p in batch.block_tables[row]]) * scale[1]
                for array, scale in zip(pages, scales, strict=True)
            )
            seen = range(max(0, position - 4), position + 1)
            scores = [2.0 * np.tanh(0.3 * (k[s] @ q[token, 2 + g]) / 2.0) for s in seen]
            weights = np.exp([*scores, sinks[2 + g]])
            expected = (weights[:-1, None] * v[list(seen)]).sum(axis=0) / weights.sum()
            np.testing.assert_allclose(out[i, 0, g], expected, rtol=1e-12)
            np.testing.assert_allclose(lse[i, 0, g], np.log(weights.sum()), rtol=1e-12)


def test_one_bad_vector_among_many_shows_in_the_error():
    expected = np.ones((1000, 4, 8))
    actual = expected.copy()
    actual[500, 2] *= 1.1
    assert oracle.relative_error(actual, expected) == pytest.approx(0.1)
    actual[0, 0, 0] = np.nan
    assert oracle.relative_error(actual, expected) == float("inf")
    infinite = np.array([-np.inf, 0.0])
    assert oracle.largest_difference(infinite, infinite) == 0
    assert oracle.largest_difference(np.zeros(2), infinite) == float("inf")


def test_busy_time_counts_overlaps_once():
    assert merge([(5, 9), (0, 3), (2, 4), (9, 10), (20, 21)]) == [(0, 4), (5, 10), (20, 21)]


@pytest.mark.jax_floor
def test_a_profile_is_read_without_tensorboard():
    program = jax.jit(lambda x: x @ x).lower(jnp.ones((256, 256))).compile()

    def work() -> None:
        for _ in range(3):
            program(jnp.ones((256, 256))).block_until_ready()

    busy = measure_busy(work)
    assert busy.num_kernels > 0
    assert 0 < busy.busy_seconds <= busy.span_seconds * 1.001


def test_targets_are_met_missed_or_not_measured():
    target = Target("t", "s", "c", 0.5, stretch=0.8)

    def verdict(fraction: float) -> str:
        return target.verdict([Result("s", "c", "ok", values={"fraction": fraction})])

    assert [verdict(0.4), verdict(0.5), verdict(0.9)] == [
        "missed",
        "met",
        "met (the stretch target too)",
    ]
    assert target.verdict([Result("s", "c", "failed", "why", {"fraction": 0.9})]) == "not measured"
    ratio = Target("r", "s", "fast", 3.0, against="slow")
    pair = [
        Result("s", name, "ok", values={"seconds": t}) for name, t in (("fast", 1), ("slow", 4))
    ]
    assert ratio.reached(pair) == 4
    assert ratio.reached(pair[:1]) is None


def test_every_target_names_a_case_of_the_real_run():
    from benchmarks.gpu import cache_ops, decode, engine, prefill

    modules = {"decode": decode, "engine": engine, "prefill": prefill, "cache": cache_ops}
    for target in TARGETS:
        names = {case.name for case in modules[target.section].cases(Context())}
        assert target.case in names
        assert target.against is None or target.against in names


def test_a_result_that_is_not_ok_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Result("s", "c", "failed")
    with pytest.raises(ValueError, match="status"):
        Result("s", "c", "fine")


def test_time_is_per_call_and_a_slow_host_is_said():
    import time

    timing = time_calls(
        lambda i: time.sleep(1e-3),
        calls=4,
        warm_seconds=0,
        repetition_seconds=0.01,
        wait=lambda x: x,
    )
    assert 0.25e-3 <= timing.seconds < 1e-3
    assert timing.host_bound


def test_shared_things_are_made_once():
    made = []
    once = Once()
    assert [once.get("a", lambda: made.append(1) or 5) for _ in range(3)] == [5, 5, 5]
    assert made == [1]
    with pytest.raises(KeyError):
        once.get("b", lambda: {}["x"])
    with pytest.raises(KeyError):
        once.get("b", lambda: 1)


@pytest.mark.parametrize("least", [1, 1 << 24], ids=["device", "host"])
def test_random_arrays_are_normal_and_seeded(least, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.batches._HOST_ELEMENTS", least)
    a, b = (np.asarray(random_array((64, 64), "float32", 2.0, seed)) for seed in (1, 2))
    for array in (a, b):
        assert 1.9 < array.std() < 2.1 and abs(array.mean()) < 0.15
        assert scipy.stats.kstest(array.ravel() / 2, "norm").pvalue > 1e-3
    assert (a == b).mean() < 0.01


def test_large_host_arrays_repeat_no_page():
    pages = host_random((600, 2, 64, 64), "bfloat16")
    assert len({page.tobytes() for page in pages.reshape(-1, 64 * 64)}) == 1200
