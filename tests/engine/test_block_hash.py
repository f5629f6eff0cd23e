from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.block_hash import BlockHasher, KeyTag

ALGORITHMS = ["sha256", "xxhash"]


def keys(algorithm: str, tokens: list[int], block_size: int = 4, extras: tuple = ()) -> list[bytes]:
    result: list[bytes] = []
    BlockHasher(algorithm, block_size).extend(result, np.array(tokens, np.int32), extras)  # type: ignore[arg-type]
    return result


def test_what_is_digested_is_canonical_cbor_spelled_out_by_hand() -> None:
    """The same bytes on every machine: RFC 8949's heads, tokens as little-endian int32."""
    tokens = [1, 256, 65536, 7, 2, 2, 2, 2]
    block = bytes.fromhex("01000000 00010000 00000100 07000000")
    first = b"\x83" + b"\x40" + b"\x50" + block + b"\x81\x82" + b"\x64salt" + b"\x61x"
    parent = hashlib.sha256(first).digest()
    second = b"\x83" + b"\x58\x20" + parent + b"\x50" + b"\x02\x00\x00\x00" * 4 + b"\x80"
    extras = ((KeyTag.SALT.value, "x"),)
    assert keys("sha256", tokens, extras=extras) == [parent, hashlib.sha256(second).digest()]
    assert keys("xxhash", tokens[:4], extras=extras) == [xxhash.xxh3_128_digest(first)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_have_keys_and_they_grow_at_the_end(algorithm: str) -> None:
    tokens = list(range(11))
    all_keys = keys(algorithm, tokens)
    assert len(all_keys) == 2 and keys(algorithm, tokens[:8]) == all_keys
    assert keys(algorithm, tokens[:7]) == all_keys[:1] and keys(algorithm, tokens[:3]) == []
    hasher = BlockHasher(algorithm, 4)  # type: ignore[arg-type]
    step_by_step: list[bytes] = []
    for start in (0, 4):
        part = np.array(tokens[start : start + 4], np.int32)
        hasher.extend(step_by_step, part, ())
    assert step_by_step == all_keys


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_stands_for_everything_before_it(algorithm: str) -> None:
    tokens = list(range(1, 13))
    plain = keys(algorithm, tokens)
    for changed in range(12):
        other = keys(algorithm, [*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(plain, other, strict=True)] == [
            block < changed // 4 for block in range(3)
        ]
    # The same tokens at other places, and blocks of another size, are other blocks.
    assert len({*keys(algorithm, [5] * 12), *keys(algorithm, [5] * 12, block_size=3)}) == 7


def test_salt_adapter_and_content_are_never_taken_for_one_another() -> None:
    hasher = BlockHasher("sha256", 4)
    tokens = bytes(16)
    variants: list[tuple] = [()]
    for tag, value in itertools.product(KeyTag, ("x", "y", b"x", "adapter", "")):
        variants.append(((tag.value, value),))
    for a, b in itertools.permutations(KeyTag, 2):
        variants.append(((a.value, "x"), (b.value, "y")))
    variants.append(((KeyTag.ADAPTER.value, "xy"),))
    variants.append(((KeyTag.ADAPTER.value, "x"), (KeyTag.ADAPTER.value, "y")))
    assert len({hasher.key(b"", tokens, extras) for extras in variants}) == len(variants)
    # Nor for tokens or a parent.
    assert hasher.key(tokens, b"") != hasher.key(b"", tokens)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.data())
def test_equal_keys_mean_equal_tokens(tokens: list[int], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.sampled_from(tokens or [0]), max_size=20))
    for i, (a, b) in enumerate(zip(keys("sha256", tokens), keys("sha256", other), strict=False)):
        assert (a == b) == (tokens[: 4 * i + 4] == other[: 4 * i + 4])
