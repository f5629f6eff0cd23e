"""How the prefill kernel's work is cut, and what sizes it takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_plan import (
    max_prefill_items,
    plan_prefill,
)


@pytest.mark.jax_floor
def test_plan_cuts_requests_into_tiles_and_sorts_them_by_cost():
    query_lens, seq_lens = [40, 0, 7, 64], [500, 30, 1000, 64]
    starts = np.concatenate([[0], np.cumsum([40, 2, 7, 64])])
    arrays = [jnp.asarray(x, jnp.int32) for x in (query_lens, starts, seq_lens)]
    max_items = max_prefill_items(113, 4, 32)
    plan = plan_prefill(*arrays, tile=32, max_items=max_items, block=64, alignment=16)
    items = np.asarray(plan.items)[: int(plan.count[0])].tolist()
    # Request, first token, tokens, position: 16, 8, 8 blocks, and a chunk of its own from position 0.
    assert items == [
        [2, 42, 7, 993],
        [0, 0, 32, 460],
        [0, 32, 8, 492],
        [3, 49, 32, 0],
        [3, 81, 32, 32],
    ]
    assert not np.asarray(plan.items)[len(items) :, 2].any()
    assert np.asarray(plan.rank)[:5].tolist() == [1, 2, 0, 3, 4]
    assert np.asarray(plan.begins).tolist() == [0, 2, 2, 3]


def test_plan_leaves_blocks_before_the_window_out_of_the_cost():
    arrays = [jnp.asarray(x, jnp.int32) for x in ([32, 64], [0, 32, 96], [2016, 200])]
    plan = plan_prefill(*arrays, tile=64, max_items=4, block=64, alignment=16, sliding_window=64)
    # What the first sees, from 1921 to 2015, begins at 1920 and takes 2 blocks; the second's, from 73 to 199, 3.
    assert np.asarray(plan.items)[:2, 0].tolist() == [1, 0]


@pytest.mark.parametrize("page_itemsize", [1, 2])
@pytest.mark.parametrize("head_size", configs.head_sizes())
def test_tuned_sizes_fit_with_enough_in_flight(head_size, page_itemsize):
    config = configs.prefill_config(head_size, page_itemsize)
    config.check(head_size, 2, page_itemsize)
    assert config.bytes_in_flight(head_size, page_itemsize) >= 64 << 10


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"PrefillConfig.cores must be at least 1, got 0"):
        configs.PrefillConfig(block_tokens=64, stages=2, cores=0)
    config = configs.PrefillConfig(block_tokens=64, stages=7)
    config.check(128, 2, 1)
    with pytest.raises(ValueError, match=r"PrefillConfig needs .* shared memory at head size 128"):
        config.check(128, 2, 2)
