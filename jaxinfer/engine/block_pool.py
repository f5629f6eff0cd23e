"""The fixed pool of KV-cache blocks: who is free, in which order they are handed out, how often each is used, and
which of them hold something that can be found again."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.block_hash import BlockKey

PADDING_BLOCK = 0
"""Never handed out: padding tokens write to it."""

_HEAD = PADDING_BLOCK
"""The padding block's links are the ends of the free queue: next of it is the head, previous the tail."""


class BlockState(enum.IntEnum):
    FREE = 0
    CACHED = 1
    """Free, and found by the key of what it holds until it is handed out anew."""
    IN_USE = 2
    SHARED = 3
    """Held more than once."""


class BlockPool:
    """Blocks 1 … `num_blocks` - 1. Free ones wait in a doubly linked queue, the one freed longest ago first.

    A block is in the queue exactly when its reference count is 0. The links are two lists indexed by block, so that
    taking a block out of the middle of the queue costs the same as from its head.

    A block may be registered under the key of what it holds. It can be found by it, free or not, until it is handed
    out anew.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is padding), got {num_blocks}."
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._ref_count = [0] * num_blocks
        self._next = [*range(1, num_blocks), _HEAD]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}

    @property
    def usage(self) -> float:
        """The share of blocks in use, in [0, 1]."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks off the head of the queue, each with one reference.

        Raises `RuntimeError`, and takes none, when there are fewer.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} KV-cache blocks wanted, {self.num_free} are free.")
        blocks = []
        following, ref_count, key_of = self._next, self._ref_count, self._key_of
        block = following[_HEAD]
        for _ in range(count):
            blocks.append(block)
            ref_count[block] = 1
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                del self._block_of[key]
            block = following[block]
        following[_HEAD] = block
        self._previous[block] = _HEAD
        self.num_free -= count
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block, taking it out of the free queue when nobody held it."""
        self._check(block)
        if self._ref_count[block] == 0:
            before, after = self._previous[block], self._next[block]
            self._next[before] = after
            self._previous[after] = before
            self.num_free -= 1
        self._ref_count[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, in this order; those that nobody holds any more join the queue's tail.

        Raises `RuntimeError` at a block that isn't held.
        """
        following, previous, ref_count = self._next, self._previous, self._ref_count
        tail = previous[_HEAD]
        freed = 0
        try:
            for block in blocks:
                count = ref_count[block] - 1
                if count < 0:
                    self._check(block)
                    raise RuntimeError(f"KV-cache block {block} is freed, but nobody holds it.")
                ref_count[block] = count
                if count == 0:
                    following[tail] = block
                    previous[block] = tail
                    tail = block
                    freed += 1
        finally:
            following[tail] = _HEAD
            previous[_HEAD] = tail
            self.num_free += freed

    def register(self, blocks: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Let each of these held blocks be found by its key. Where another block is found by it already, that one
        stays."""
        key_of, block_of = self._key_of, self._block_of
        for block, key in zip(blocks, keys, strict=True):
            if block_of.setdefault(key, block) == block:
                key_of[block] = key

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks registered under `keys`, up to the first key that has none. They are not taken: see `share`."""
        blocks = []
        block_of = self._block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def get(self, key: BlockKey) -> int | None:
        """The block registered under this key."""
        return self._block_of.get(key)

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` somebody holds."""
        ref_count = self._ref_count
        return sum(ref_count[block] > 0 for block in blocks)

    def forget(self) -> None:
        """No block is found any more under the key that it had."""
        self._block_of.clear()
        self._key_of = [None] * self.num_blocks

    def states(self) -> npt.NDArray[np.uint8]:
        """The `BlockState` of every block but the padding block [num_blocks - 1]."""
        held = np.fromiter(self._ref_count, np.int32, self.num_blocks)
        findable = np.zeros(self.num_blocks, np.uint8)
        findable[np.fromiter(self._block_of.values(), np.int32, len(self._block_of))] = 1
        states = np.where(held > 0, np.minimum(held, 2) + 1, findable).astype(np.uint8)
        return states[PADDING_BLOCK + 1 :]

    def free_queue(self) -> list[int]:
        """The free blocks in the order in which they will be handed out."""
        blocks = []
        block = self._next[_HEAD]
        while block != _HEAD:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _check(self, block: int) -> None:
        if not PADDING_BLOCK < block < self.num_blocks:
            raise RuntimeError(
                f"KV-cache block {block} is not one of 1 … {self.num_blocks - 1} (0 is padding)."
            )
