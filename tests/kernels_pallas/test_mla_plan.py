"""The plan of the Mosaic GPU latent attention: every block once, equal shares, and pieces that the merge finds."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.mla_attention.mosaic_gpu_config import BLOCK_TOKENS, MlaConfig, heads_per_tile
from kernels_pallas.mla_attention.mosaic_gpu_plan import plan_runs, plan_tiles

CONFIG = MlaConfig(4, 2)


def pieces_of(plan, block):
    """Per run [(tile, first block, end block)], as the kernel walks through them."""
    tiles, runs = (np.asarray(x) for x in (plan.tiles, plan.runs))
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // block) * (tiles[:, 2] > 0)
    walks = []
    for (tile, first), (last_tile, last_block) in itertools.pairwise(runs):
        walk = []
        for index in range(tile, last_tile + (last_block > 0)):
            end = last_block if index == last_tile else blocks[index]
            begin = first if index == tile else 0
            if end > begin:
                walk.append((index, begin, end))
        walks.append(walk)
    return walks, blocks


@functools.partial(jax.jit, static_argnames=("num_tokens", "tile", "num_runs"))
def jitted(starts, lengths, *, num_tokens, tile, num_runs):
    return plan_runs(plan_tiles(starts, lengths, num_tokens, tile), num_runs, CONFIG)


def make_plan(lengths, tokens, tile, num_runs, num_tokens=None):
    starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    return jitted(
        starts,
        np.array(lengths, np.int32),
        num_tokens=num_tokens or int(starts[-1]),
        tile=tile,
        num_runs=num_runs,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 2, 5, 30])),
        min_size=1,
        max_size=6,
    ),
    # Few shapes, as each is compiled.
    runs_and_tile=st.sampled_from([(1, 4), (2, 1), (7, 4), (33, 1)]),
)
def test_every_block_is_worked_on_once_and_every_piece_is_merged(requests, runs_and_tile):
    num_runs, tile = runs_and_tile
    requests = requests + [(0, 0)] * (6 - len(requests))
    lengths = [0 if context % 11 == 0 else context + tokens for context, tokens in requests]
    tokens = [tokens for _, tokens in requests]
    plan = make_plan(lengths, tokens, tile, num_runs, num_tokens=180)
    walks, blocks = pieces_of(plan, BLOCK_TOKENS)
    done = [np.zeros(count, int) for count in blocks]
    pieces = {}
    for run, walk in enumerate(walks):
        for index, begin, end in walk:
            done[index][begin:end] += 1
            if (begin, end) != (0, blocks[index]):
                number = 2 * run + (begin == 0)
                assert number not in pieces
                pieces[number] = index
    assert all((count == 1).all() for count in done)
    merged = {}
    for run, (index, count) in enumerate(np.asarray(plan.merges)):
        for k in range(count):
            merged[2 * run + max(2 * k, 1)] = index
    assert merged == pieces
    expected = sum(-(-n // tile) for n, seq_len in zip(tokens, lengths, strict=True) if seq_len)
    assert np.count_nonzero(blocks) == expected


@pytest.mark.parametrize(
    "lengths",
    [[131_072], [4096] * 64, [1024] * 256, list(range(500, 8500, 125)), [100_000] + [700] * 40],
    ids=["one", "equal", "many", "unequal", "one_is_long"],
)
def test_shares_are_even(lengths):
    plan = make_plan(lengths, [1] * len(lengths), 1, 132)
    walks, blocks = pieces_of(plan, BLOCK_TOKENS)
    costs = [sum(end - begin + CONFIG.start_blocks for _, begin, end in walk) for walk in walks]
    mean = (blocks.sum() + CONFIG.start_blocks * len(lengths)) / len(walks)
    # Pieces of a cut tile have their own start, and cuts close to a tile's end are moved there.
    assert max(costs) <= mean + 2 * CONFIG.start_blocks + 2 * CONFIG.snap_blocks


def test_little_work_is_not_spread_thin():
    walks, _ = pieces_of(make_plan([200], [1], 1, 132), BLOCK_TOKENS)
    assert [walk for walk in walks if walk] == [[(0, 0, 7)]]


@pytest.mark.parametrize(
    ("num_heads", "heads"), [(8, 8), (16, 16), (32, 32), (64, 64), (96, 48), (128, 64), (40, 40)]
)
def test_heads_of_a_tile(num_heads, heads):
    assert heads_per_tile(num_heads) == heads
