"""Keys of cached blocks: equal exactly where the keys and values in the block are.

A key is the digest of the key of the block before it, the block's tokens, and whatever else makes the block's content
differ. So it stands for the whole sequence up to the block's end, at a cost that does not grow with it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence

import cbor2

from jaxinfer.config import PrefixCachingHashAlgo
from jaxinfer.engine.plan import Int32

type BlockKey = bytes
type Extra = tuple[str, str | bytes]
"""A `KeyTag` and its value."""


class KeyTag(enum.StrEnum):
    """What else than tokens a block's content depends on, by kind: the same string as an adapter's name and as a salt
    gives two keys.

    Adapter and salt hold for a whole sequence and stand in its first block, whose key all others contain. Content is
    the digest of what takes the place of token ids (an image), and stands in every block that it reaches into.
    """

    ADAPTER = "adapter"
    CONTENT = "content"
    SALT = "salt"


def group_key(key: BlockKey, group: int) -> BlockKey:
    """The key of the block that holds the same tokens for a group of layers; keys without a group's number, which are
    shorter, are those of group 0."""
    return key + bytes((group,)) if group else key


class BlockHasher:
    """`algorithm` "sha256" can't be fooled; "xxhash" (128 bits) is quicker, but who chooses prompts could make two of
    them collide, and read another's cache.

    What is digested is the canonical CBOR (RFC 8949, 4.2) of [parent, tokens, extras], tokens as little-endian int32:
    the same bytes in every process and on every machine.
    """

    def __init__(self, algorithm: PrefixCachingHashAlgo, block_size: int) -> None:
        self._digest = _digest(algorithm)
        self._block_bytes = 4 * block_size
        # All blocks but a sequence's first differ only in parent and tokens, whose lengths are fixed: their frame is
        # encoded once. No length's last byte is 0xfe or 0xff, so these can't be mistaken.
        parent, tokens = b"\xff" * len(self._digest(b"")), b"\xfe" * self._block_bytes
        before, _, rest = _encode(parent, tokens, ()).partition(parent)
        between, _, after = rest.partition(tokens)
        self._frame = before, between, after

    def key(self, parent: BlockKey, tokens: bytes, extras: Sequence[Extra] = ()) -> BlockKey:
        """The key of a block after the one of key `parent` (empty for a sequence's first block)."""
        return self._digest(_encode(parent, tokens, extras))

    def extend(self, keys: list[BlockKey], token_ids: Int32, extras: Sequence[Extra] = ()) -> None:
        """Append the keys of the full blocks of `token_ids`, the tokens after those that `keys` stand for. `extras`
        are those of the sequence, for its first block."""
        data = token_ids.astype("<i4", copy=False).tobytes()
        num_bytes = self._block_bytes
        first = 0
        if not keys and len(data) >= num_bytes:
            keys.append(self.key(b"", data[:num_bytes], extras))
            first = num_bytes
        digest, before, between, after = self._digest, *self._frame
        for start in range(first, len(data) - num_bytes + 1, num_bytes):
            tokens = data[start : start + num_bytes]
            keys.append(digest(before + keys[-1] + between + tokens + after))


def _encode(parent: BlockKey, tokens: bytes, extras: Sequence[Extra]) -> bytes:
    return cbor2.dumps((parent, tokens, extras), canonical=True)


def _digest(algorithm: PrefixCachingHashAlgo) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    import xxhash

    return xxhash.xxh3_128_digest
