"""Who does what: tiles of query rows, and the runs of key blocks that thread blocks work through, computed on the device.

A thread block takes up all of a core, so there are as many runs as cores and each should take equally long. The blocks
of all tiles form one list, which is cut into equal runs: a run may end within a tile's context and the next one goes on
from there. Only tiles that are cut have partial results to merge.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.mla_attention.mosaic_gpu_config import BLOCK_TOKENS, MlaConfig
from kernels_pallas.ragged_paged_attention.mosaic_gpu.prefill_plan import (
    cut_tiles,
    max_prefill_items,
)


class MlaPlan(NamedTuple):
    """Tiles, runs over their blocks, and merges of tiles that were cut.

    The piece with which run c enters a tile that it did not begin is number 2 * c, one that it begins and doesn't end
    is number 2 * c + 1.
    """

    tiles: jax.Array
    """[U, 4] int32: request, first token, number of tokens (0 past the last tile), position of the first."""
    runs: jax.Array
    """[C + 1, 2] int32: tile and block at which run c begins and run c - 1 ends."""
    merges: jax.Array
    """[C, 2] int32: the tile that run c begins and doesn't end, and its number of pieces; 0 where there is none."""


def plan_tiles(
    query_start_loc: jax.Array, seq_lens: jax.Array, num_tokens: int, tile: int
) -> jax.Array:
    """`MlaPlan.tiles` of `tile` tokens at most; requests without a context get none."""
    starts = query_start_loc[:-1]
    query_lens = jnp.where(seq_lens > 0, query_start_loc[1:] - starts, 0)
    max_tiles = max_prefill_items(num_tokens, seq_lens.shape[0], tile)
    return cut_tiles(query_lens, query_start_loc, seq_lens, tile, max_tiles)[0]


def plan_runs(tiles: jax.Array, num_runs: int, config: MlaConfig) -> MlaPlan:
    """Cut the blocks of all tiles into `num_runs` runs of about equal cost, some of them empty if there is little."""
    ends = jnp.where(tiles[:, 2] > 0, tiles[:, 3] + tiles[:, 2], 0)
    blocks = -(-ends // BLOCK_TOKENS)
    cost = jnp.where(blocks > 0, blocks + config.start_blocks, 0)
    cost_ends = jnp.cumsum(cost, dtype=jnp.int32)
    total = cost_ends[-1]
    num_tiles = jnp.sum(cost_ends < total, dtype=jnp.int32) + (total > 0)
    used = jnp.clip(total // config.min_blocks, 1, num_runs)
    run = jnp.minimum(jnp.arange(num_runs + 1, dtype=jnp.int32), used)
    # Not run * total // used, which may overflow.
    cut = run * (total // used) + run * (total % used) // used
    tile = jnp.sum(cost_ends[None, :] <= cut[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(tile, tiles.shape[0] - 1)
    block = cut - (cost_ends - cost)[inside] - config.start_blocks
    at_begin = block < config.snap_blocks
    at_end = ~at_begin & (blocks[inside] - block < config.snap_blocks)
    tile = jnp.minimum(tile + at_end, num_tiles)
    block = jnp.where(at_begin | at_end | (tile == num_tiles), 0, block)
    runs = jnp.stack([tile, block], axis=1).astype(jnp.int32)

    enters = block > 0
    same_tile = tile[1:, None] == tile[None, :]
    pieces = 1 + jnp.sum(same_tile & enters[None, :], axis=1, dtype=jnp.int32)
    begins = enters[1:] & ~((tile[:-1] == tile[1:]) & enters[:-1])
    merges = jnp.stack([tile[1:], jnp.where(begins, pieces, 0)], axis=1).astype(jnp.int32)
    return MlaPlan(tiles, runs, merges)
