"""The longest beginning of a sequence that every group of layers finds in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.engine.block_hash import BlockKey, group_key
from jaxinfer.engine.kv_cache_manager import CachedPrefix, KVCacheManager


def longest_prefix(kv: KVCacheManager, keys: Sequence[BlockKey]) -> CachedPrefix:
    """Of the blocks with these keys, one per column. A group that looks back at all tokens (there is one at most, the
    first) must have all blocks of the prefix; one with a window those that the token after the prefix looks back at."""
    if kv.windows == (None,):
        blocks = kv.pool.find(keys)
        return CachedPrefix(len(blocks), [blocks])
    found: list[list[int]] = [[] for _ in kv.windows]
    length = len(keys)
    if kv.windows[0] is None:
        found[0] = kv.pool.find(keys)
        length = len(found[0])
    scans = [
        _Scan(kv, keys, group, window)
        for group, window in enumerate(kv.windows)
        if window is not None
    ]
    # Each group can only shorten the prefix, and none looks at a block twice.
    while (shorter := min(scan.at_most(length) for scan in scans)) < length:
        length = shorter
    for scan in scans:
        found[scan.group] = scan.blocks()
    if kv.windows[0] is None:
        del found[0][length:]
    return CachedPrefix(length, found)


class _Scan:
    """One windowed group's blocks, looked up from the last one backwards: `_found` are those before column `_end`."""

    def __init__(
        self, kv: KVCacheManager, keys: Sequence[BlockKey], group: int, window: int
    ) -> None:
        self.group = group
        self._pool, self._block_size = kv.pool, kv.block_size
        self._keys, self._window = keys, window
        self._end = len(keys)
        self._found: list[int] = []

    def at_most(self, length: int) -> int:
        """The longest prefix, of up to `length` columns, whose last window is there."""
        del self._found[: max(self._end - length, 0)]
        self._end = length
        while (column := self._end - len(self._found)) > self._first_needed():
            block = self._pool.get(group_key(self._keys[column - 1], self.group))
            if block is None:
                self._end, self._found = column - 1, []
            else:
                self._found.append(block)
        return self._end

    def blocks(self) -> list[int]:
        """Of the window before the prefix that was found last, in order."""
        return self._found[::-1]

    def _first_needed(self) -> int:
        return max(self._end * self._block_size - (self._window - 1), 0) // self._block_size
