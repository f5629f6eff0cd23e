"""The Mosaic GPU decode kernels without a GPU: in the interpreter against a float64 oracle, with planted faults, and compiled
for the H200.

Faults run in processes of their own with a time limit, as a wrong kernel may hang or abort. `MOSAIC_ATTENTION_LONG=1` adds all
cases and faults, a random run, and every page size and dtype to the compiled set.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.compile_job import JobError, run_job
from kernels_pallas.ragged_paged_attention import mosaic_gpu_config
from kernels_pallas.ragged_paged_attention.mosaic_gpu_decode_plan import (
    ITEM_COST,
    Row,
    Walk,
    item_of,
    plan_decode,
)
from kernels_pallas.ragged_paged_attention.mosaic_gpu_decode_shape import DecodeShape
from tests.gpu_compiler import needs_compiler

HERE = Path(__file__).parent
LONG = bool(os.environ.get("MOSAIC_ATTENTION_LONG"))
TOLERANCE = 1e-2
STUCK = "no progress"


def sizes(cores: int, min_blocks: int = 1, slots: int = 3, block_tokens: int = 64) -> dict:
    return {
        "block_tokens": block_tokens,
        "slots": slots,
        "blocks_per_core": 1,
        "cores": cores,
        "min_blocks": min_blocks,
    }


ONE_WALK = sizes(1, min_blocks=9)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # 20 tiles through 3 slots.
    "one_walk": ({"rows": [(500, 1), (64, 1), (1, 1)]}, ONE_WALK),
    # 19 blocks and starts in shares of 4: three requests are cut.
    "up_to_eight_tokens_cut_between_walks": (
        {
            "rows": [(300, 3), (130, 8), (7, 7), (65, 1)],
            "group": 5,
            "head_size": 128,
            "return_lse": True,
            "padding_tokens": 2,
        },
        sizes(5),
    ),
    # 14 blocks and starts for each head in shares of 7: one request is cut for either.
    "two_loops_with_every_option": (
        {
            "rows": [(200, 8), (130, 1), (90, 2)],
            "group": 8,
            "kv_heads": 2,
            "sliding_window": 70,
            "soft_cap": 5.0,
            "sinks": True,
            "return_lse": True,
        },
        sizes(4),
    ),
    "float8": (
        {
            "rows": [(300, 4), (64, 1)],
            "head_size": 128,
            "page_size": 32,
            "page_dtype": "float8_e4m3fn",
        },
        sizes(1),
    ),
    "int8_odd_head_size": (
        {
            "rows": [(330, 1), (64, 2)],
            "group": 1,
            "head_size": 80,
            "page_size": 128,
            "dtype": "float16",
            "page_dtype": "int8",
            "sinks": True,
            "return_lse": True,
        },
        sizes(2),
    ),
    "not_causal": (
        {
            "rows": [(130, 3), (64, 1)],
            "group": 7,
            "head_size": 96,
            "kv_heads": 2,
            "page_size": 64,
            "causal": False,
            "return_lse": True,
        },
        sizes(2),
    ),
    "requests_left_out": (
        {
            "rows": [(130, 2), (64, 30), (0, 0), (5, 1)],
            "left_out": [1],
            "return_lse": True,
            "padding_tokens": 3,
        },
        sizes(3),
    ),
    # Five slots let the producer run two items ahead.
    "more_items_than_walks": ({"rows": [(20, 1)] * 7, "kv_heads": 2}, sizes(2, slots=5)),
}

LONG_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wide_heads": (
        {"rows": [(330, 2), (64, 1)], "group": 2, "head_size": 256, "sliding_window": 300},
        sizes(1, slots=4),
    ),
    "no_items": (
        {"rows": [(64, 30), (0, 0)], "left_out": [0], "return_lse": True, "padding_tokens": 3},
        sizes(3),
    ),
    "more_walks_than_items": ({"rows": [(300, 1)], "group": 16}, sizes(7, block_tokens=128)),
    "query_heads_in_two_parts": (
        {"rows": [(130, 1), (7, 1)], "group": 64, "head_size": 256, "sinks": True},
        sizes(2),
    ),
}

FAULT_CASE = CASES["one_walk"]
TOKENS_CASE = CASES["up_to_eight_tokens_cut_between_walks"]
OPTIONS_CASE = CASES["two_loops_with_every_option"]
MANY_CASE = CASES["more_items_than_walks"]
NARROW_CASE = CASES["float8"]
_FREE_KEYS = "plgpu.barrier_arrive(r.free.at[slots[0]])"
_QK = "scores = tiles.matmul(keys, queries_t, None, interpret)\n"
_FREE_VALUES = "plgpu.barrier_arrive(r.free.at[slots[1]])"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "no_wait_for_keys": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.full.at[slots[0]])", "pass")],
    ),
    "no_wait_for_values": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.full.at[slots[1]])", "pass")],
    ),
    "no_wait_for_queries": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.q_full.at[stage])", "pass")],
    ),
    "no_wait_for_free_slots": (
        FAULT_CASE, "decode_kernel",
        [("functools.partial(plgpu.barrier_wait, r.free.at[slot])", "lambda: None")],
    ),
    "queries_overwrite_those_of_an_item_before": (
        MANY_CASE, "decode_kernel", [("plgpu.barrier_wait(r.q_free.at[stage])", "None")],
    ),
    "queries_given_up_before_they_are_read": (
        MANY_CASE, "decode_kernel",
        [("        plgpu.barrier_arrive(r.q_free.at[stage])\n", ""),
         ("        plgpu.barrier_wait(r.q_full.at[stage])\n",
          "        plgpu.barrier_wait(r.q_full.at[stage])\n"
          "        plgpu.barrier_arrive(r.q_free.at[stage])\n")],
    ),
    "too_many_arrivals": (
        FAULT_CASE, "decode", [("num_arrivals=copies,", "num_arrivals=copies + 1,")],
    ),
    "too_few_arrivals": (
        FAULT_CASE, "decode", [("num_arrivals=copies,", "num_arrivals=copies // 2,")],
    ),
    "keys_given_up_before_use": (
        FAULT_CASE, "decode_kernel",
        [(f"                {_QK}                {_FREE_KEYS}\n",
          f"                {_FREE_KEYS}\n                {_QK}")],
    ),
    "values_given_up_before_use": (
        FAULT_CASE, "decode_kernel",
        [(f"                {_FREE_VALUES}\n            return accs",
          "                pass\n            return accs"),
         ("            weights_t = weights_s",
          f"            {_FREE_VALUES}\n            weights_t = weights_s")],
    ),
    "narrow_keys_given_up_before_use": (
        NARROW_CASE, "decode_kernel",
        [(f"                widen(keys, wide_s, columns=self.narrow_columns)\n                {_FREE_KEYS}\n",
          f"                {_FREE_KEYS}\n                widen(keys, wide_s, columns=self.narrow_columns)\n")],
    ),
    "result_overwrites_one_that_is_leaving": (
        MANY_CASE, "columns", [("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass")],
    ),
    "a_token_sees_the_next_one": (
        TOKENS_CASE, "decode_kernel", [("seen = distance >= 0", "seen = distance >= -1")],
    ),
    "the_last_token_does_not_see_itself": (
        TOKENS_CASE, "decode_kernel", [("seen = distance >= 0", "seen = distance >= 1")],
    ),
    "edge_between_tokens_not_masked": (
        TOKENS_CASE, "decode_kernel",
        [("start + block > (first_position + 1", "start + block > (seq_len")],
    ),
    "window_one_too_long": (
        OPTIONS_CASE, "decode_kernel",
        [("distance < c.sliding_window", "distance <= c.sliding_window")],
    ),
    "window_edge_of_later_tokens_not_masked": (
        OPTIONS_CASE, "decode_kernel",
        [("on_edge |= start < first_visible + item.row.num_tokens - 1",
          "on_edge |= start < first_visible - block")],
    ),
    "whole_context_one_too_long": (
        CASES["not_causal"], "decode_kernel", [("position < seq_len", "position <= seq_len")],
    ),
    "unused_values_not_cleared": (
        FAULT_CASE, "tiles", [("row < num_used", "row < num_used + block")],
    ),
    "page_off_by_one": (
        FAULT_CASE, "tiles",
        [("lax.clamp(first_page, page, last_page)", "lax.clamp(first_page, page + 1, last_page)")],
    ),
    "last_item_of_a_walk_not_loaded": (
        MANY_CASE, "decode_kernel",
        [("lax.fori_loop(0, self.walk.count, load_item", "lax.fori_loop(0, self.walk.count - 1, load_item")],
    ),
    "last_item_of_a_walk_left_out": (
        MANY_CASE, "decode_kernel",
        [("lax.fori_loop(0, self.walk.count,", "lax.fori_loop(0, self.walk.count - 1,")],
    ),
    "a_walk_takes_one_block_of_the_next": (
        TOKENS_CASE, "decode_plan",
        [("walk.end - start, row.num_blocks", "walk.end - start + 1, row.num_blocks")],
    ),
    "a_token_too_many_written": (
        TOKENS_CASE, "columns", [("@pl.loop(0, num_tokens)", "@pl.loop(0, num_tokens + 1)")],
    ),
    "merge_drops_the_last_part": (
        TOKENS_CASE, "merge", [("count = last_walk - index + 1", "count = last_walk - index")],
    ),
    "part_in_the_wrong_place": (
        TOKENS_CASE, "merge", [("+ (safe == 0).astype(jnp.int32)", "")],
    ),
    "log_sum_exp_in_base_2": (
        TOKENS_CASE, "columns", [("lse * (1 / tiles.LOG2_E)", "lse")],
    ),
    "sink_counted_in_every_part": (
        OPTIONS_CASE, "decode_kernel",
        [("        factor, lse = col.finish(peak, total, None)\n",
          "        sinks = col.sinks_of(self.r.sinks, item.head * 8, 8, 8, peak.shape[0])\n"
          "        factor, lse = col.finish(peak, total, sinks)\n")],
    ),
    "sink_forgotten_in_the_merge": (
        OPTIONS_CASE, "merge", [('if hasattr(r, "sinks"):', "if False:")],
    ),
    "tokens_of_no_request_left_as_they_are": (
        CASES["requests_left_out"], "decode_kernel", [('hasattr(self.r, "num_owned")', "False")],
    ),
}  # fmt: skip
CORE_FAULTS = [
    "no_wait_for_values",
    "no_wait_for_free_slots",
    "too_many_arrivals",
    "keys_given_up_before_use",
    "edge_between_tokens_not_masked",
    "a_walk_takes_one_block_of_the_next",
    "sink_counted_in_every_part",
]

# JAX 0.11's interpreter doesn't order a read before the barrier that lets its place be overwritten.
UNSEEN = (
    {
        "queries_given_up_before_they_are_read",
        "keys_given_up_before_use",
        "values_given_up_before_use",
        "narrow_keys_given_up_before_use",
    }
    if jax.__version_info__ < (0, 12)
    else set()
)


def job(function: str, timeout: float = 240, env: dict | None = None, **arguments: Any) -> Any:
    return run_job(
        f"mosaic_decode_jobs:{function}",
        arguments,
        timeout=timeout,
        env=env,
        python_path=(str(HERE),),
    )


def check(result: dict[str, Any]) -> str | None:
    """What is wrong with a run, or None."""
    for name in ("finite", "untouched"):
        if not result[name]:
            return f"not {name}"
    if result["races"]:
        return "race"
    if result["lse_error"] > 1e-3:
        return f"log-sum-exp off by {result['lse_error']:.3g}"
    return None if result["error"] < TOLERANCE else f"error {result['error']:.3g}"


@pytest.fixture(scope="module")
def runs(request):
    """Results to come of the jobs that the selected tests need; two run at a time."""
    pool, futures = ThreadPoolExecutor(2), {}
    chosen = {}
    for item in request.session.items:
        if item.path != Path(__file__) or not hasattr(item, "callspec"):
            continue
        name = item.callspec.id
        if item.originalname == "test_matches_the_oracle":
            chosen[name] = (CASES | LONG_CASES)[name]
        if item.originalname == "test_planted_faults_are_caught":
            (case, config), module, edits = FAULTS[name]
            futures[name] = pool.submit(
                job, "run_with_fault", case=case, config=config, module=module, edits=edits
            )
    if chosen:
        futures["cases"] = pool.submit(job, "run_cases", timeout=600, cases=chosen)
    yield futures
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES | LONG_CASES if LONG else CASES)
def test_matches_the_oracle(name, runs):
    result = runs["cases"].result()[name]
    print(result)
    assert check(result) is None


@pytest.mark.parametrize(
    "name", [name for name in (FAULTS if LONG else CORE_FAULTS) if name not in UNSEEN]
)
def test_planted_faults_are_caught(name, runs):
    try:
        found = check(runs[name].result())
    except JobError as error:
        found = str(error)[-300:]
        # A race or a misused barrier, noticed by the interpreter, or a wait without end. Not a slow
        # machine, nor a fault that could not be planted.
        signs = ("RACE DETECTED", "Barrier", "barrier", "Thread", STUCK)
        assert "took longer" not in str(error), error
        assert any(sign in str(error) for sign in signs), error
    print(found)
    assert found is not None


_plan = jax.jit(
    plan_decode,
    static_argnames=("block", "sliding_window", "num_kv_heads", "num_walks", "min_blocks"),
)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_walks", "min_blocks", "window"),
    [(1, 1, 1, None), (2, 9, 1, None), (3, 4, 2, 9), (1, 7, 4, 1)],
)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=7, max_size=7))
def test_walks_take_every_block_once_and_equal_shares(
    rows, num_kv_heads, num_walks, min_blocks, window
):
    seq_lens = np.array([length for length, _ in rows], np.int32)
    query_lens = np.array([tokens for _, tokens in rows], np.int32)
    plan = _plan(
        seq_lens,
        np.cumsum(query_lens, dtype=np.int32) - query_lens,
        query_lens,
        block=4,
        sliding_window=window,
        num_kv_heads=num_kv_heads,
        num_walks=num_walks,
        min_blocks=min_blocks,
    )
    row_table, walks = np.asarray(plan.rows), [Walk(*row) for row in np.asarray(plan.walks)]
    taken: dict[tuple[int, int], list[int]] = {}
    starts: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for number, walk in enumerate(walks):
        cost = 0
        for index in range(walk.count):
            item = item_of(row_table, walk, np.int32(index))
            key = (int(item.head), int(item.row.request))
            first, count = int(item.first_block), int(item.num_blocks)
            taken.setdefault(key, []).extend(range(first, first + count))
            starts.setdefault(key, []).append((number, bool(item.opens), bool(item.closes)))
            cost += count
        assert cost <= int(walk.share)
        assert walk.share >= min_blocks + ITEM_COST
    for head in range(num_kv_heads):
        for request, (seq_len, tokens) in enumerate(rows):
            key = (head, request)
            if tokens == 0:
                assert key not in taken
                continue
            first = 0 if window is None else max(seq_len - tokens + 1 - window, 0) // 4
            assert taken[key] == list(range(first, -(-seq_len // 4)))
            # Opened once, closed once, by neighbours.
            numbers = [number for number, _, _ in starts[key]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert [opens for _, opens, _ in starts[key]] == [True] + [False] * (len(numbers) - 1)
            assert [closes for *_, closes in starts[key]] == [False] * (len(numbers) - 1) + [True]


def test_plan_gives_long_contexts_to_many_walks():
    one = jnp.ones(2, jnp.int32)
    plan = plan_decode(
        jnp.array([6400, 64], jnp.int32), jnp.arange(2, dtype=jnp.int32), one,
        block=64, sliding_window=None, num_kv_heads=2, num_walks=10, min_blocks=4,
    )  # fmt: skip
    rows = [Row(*row) for row in np.asarray(plan.rows).tolist()]
    assert [(row.num_blocks, row.start) for row in rows] == [(100, 0), (1, 102)]
    # 210 blocks and what starting and ending costs, in 10 shares.
    assert [tuple(walk[:3]) for walk in np.asarray(plan.walks).tolist()] == [
        *[(0, 0, 1)] * 4,
        (0, 0, 2),
        *[(1, 0, 1)] * 4,
        (1, 0, 2),
    ]


def test_shapes_take_as_many_tokens_as_fit():
    tokens = {group: DecodeShape.of(group, 128, 8).tokens for group in (1, 4, 5, 7, 8, 16, 40, 64)}
    assert tokens == {1: 8, 4: 8, 5: 8, 7: 8, 8: 8, 16: 4, 40: 1, 64: 1}
    assert DecodeShape.of(4, 128, 8).columns == 32
    assert DecodeShape.of(8, 256, 8).tokens == 4
    # 80 numbers of 16 bits: every fourth row begins at a multiple of 128 bytes.
    assert DecodeShape.of(5, 80, 1).heads == 8
    halves = DecodeShape.of(64, 256, 8)
    assert (halves.group, halves.splits, halves.tokens) == (32, 2, 1)


@pytest.mark.parametrize("page_itemsize", [1, 2])
@pytest.mark.parametrize("head_size", mosaic_gpu_config.head_sizes())
def test_tuned_sizes_fit_with_enough_in_flight(head_size, page_itemsize):
    for group in (1, 4, 5, 7, 8, 16, 33, 64):
        for tokens in (1, 2, 8):
            columns = DecodeShape.of(group, head_size, tokens).columns
            config = mosaic_gpu_config.decode_config(head_size, columns, page_itemsize)
            config.check(head_size, columns, page_itemsize)
            assert config.bytes_in_flight(head_size, page_itemsize) >= 64 << 10
            used = config.shared_memory(head_size, columns, page_itemsize)
            whole = mosaic_gpu_config.SHARED_MEMORY_PER_CORE
            assert config.blocks_per_core * (used + 1024) <= whole


@needs_compiler
@pytest.mark.parametrize("head_size", mosaic_gpu_config.head_sizes(), ids=str)
def test_compiles_for_the_h200(head_size, tmp_path):
    everything = {
        "sinks": True,
        "return_lse": True,
        "sliding_window": 1000,
        "soft_cap": 30.0,
        "mixed": True,
    }
    shapes, dtypes = [[8, 1]], [("bfloat16", "bfloat16")]
    if head_size == 128:
        shapes, dtypes = [[8, 8]], [*dtypes, ("bfloat16", "float8_e4m3fn")]
    options, page_sizes = [everything], [16]
    if LONG:
        shapes = [[8, 1], [4, 8], [8, 8], [64, 1]]
        pages = ("float8_e4m3fn", "int8")
        dtypes = [(q, kv) for q in ("bfloat16", "float16") for kv in (q, *pages)]
        options = [{}, everything, {"causal": False, "return_lse": True}]
        page_sizes = [16, 32, 64, 128]
    env = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": str(tmp_path),
    }
    reports = job(
        "compile_decode",
        timeout=3000,
        env=env,
        head_sizes=[head_size],
        page_sizes=page_sizes,
        dtypes=dtypes,
        shapes=shapes,
        options=options,
    )
    assert {report["kernel"] for report in reports} == {"paged_decode", "paged_decode_merge"}
    for report in reports:
        print(report)
        assert report["spills"] == 0, report
        if report["kernel"] != "paged_decode":
            continue
        # 256 threads a block, of 65536 registers in a core.
        assert report["registers"] * 256 * report["blocks_per_core"] <= 65536, report
        assert report["wgmma"] > 0, report
        assert report["tma"] > 0, report
        # Queries, weights, cleared values and results reach wgmma and TMA through generic stores.
        assert report["fences"] >= 4, report
        assert report["in_flight"] >= 64 << 10, report
        if report["shared_memory"] is not None:
            assert report["shared_memory"] <= report["budget"], report


@pytest.mark.skipif(not LONG, reason="long run: MOSAIC_ATTENTION_LONG=1")
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_match_the_oracle(seed):
    rng = random.Random(seed)
    group, head_size = rng.choice([1, 3, 4, 5, 7, 8, 16]), rng.choice([64, 80, 96, 128, 256])
    most = rng.choice([1, DecodeShape.of(group, head_size, 8).tokens])
    rows = [(0, 0)] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 5)):
        query_len = rng.randint(1, most)
        rows.append((query_len + rng.choice([rng.randint(0, 30), rng.randint(0, 700)]), query_len))
    rng.shuffle(rows)
    causal = rng.random() < 0.7
    case = {
        "rows": rows,
        "group": group,
        "head_size": head_size,
        "kv_heads": rng.choice([1, 2]),
        "page_size": rng.choice([16, 32, 64, 128]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "page_dtype": rng.choice([None, "float8_e4m3fn", "int8"]),
        "sliding_window": rng.choice([None, None, 1, 60, 200]) if causal else None,
        "soft_cap": rng.choice([None, 3.0]),
        "causal": causal,
        "sinks": rng.random() < 0.5,
        "return_lse": rng.random() < 0.5,
        "padding_tokens": rng.randint(0, 9),
        "seed": seed,
    }
    config = sizes(rng.choice([1, 2, 5]), rng.choice([1, 4]), rng.choice([3, 4]))
    result = job("run_case", timeout=400, case=case, config=config)
    assert check(result) is None, (case, config, result)
