from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.engine.block_pool import BlockPool


def test_blocks_come_in_order_of_freeing_and_never_block_0() -> None:
    pool = BlockPool(6)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.usage == 1.0
    pool.free([4, 2])
    pool.free([5])
    assert pool.allocate(3) == [4, 2, 5]


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert pool.num_free == 2 and block not in pool.free_queue()
    pool.free([block])
    assert pool.free_queue() == [2, 3, block]


def test_a_free_block_can_be_taken_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(6)
    pool.share(3)
    assert pool.free_queue() == [1, 2, 4, 5]
    pool.share(5)
    pool.share(1)
    assert pool.allocate(2) == [2, 4]
    with pytest.raises(RuntimeError, match="1 KV-cache blocks wanted, 0 are free"):
        pool.allocate(1)


def test_errors_leave_the_pool_as_it_was() -> None:
    pool = BlockPool(4)
    held = pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 KV-cache blocks wanted, 2 are free"):
        pool.allocate(3)
    with pytest.raises(RuntimeError, match="block 2 is freed, but nobody holds it"):
        pool.free([2])
    for block in (0, 4, -1):
        with pytest.raises(RuntimeError, match=f"block {block} is not one of 1 … 3"):
            pool.share(block)
    with pytest.raises(RuntimeError, match="block 0 is not one of"):
        pool.free([0])
    assert pool.free_queue() == [2, 3]
    pool.free(held)
    with pytest.raises(RuntimeError, match="block 1 is freed, but nobody holds it"):
        pool.free(held)
    assert pool.free_queue() == [2, 3, 1] and pool.num_free == 3


def test_a_double_free_in_one_call_frees_once() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.free([2, 2, 3])
    assert pool.free_queue() == [2] and pool.num_free == 1


def test_a_pool_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_what_a_block_holds_is_found_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(5)
    first, second, third = pool.allocate(3)
    pool.register([first, second], [b"a", b"b"])
    pool.register([third], [b"a"])
    assert pool.find([b"a", b"b", b"x", b"a"]) == [first, second], "the first of equal blocks stays"
    assert pool.find([b"x", b"a"]) == [], "up to the first that isn't there"
    pool.free([third, second, first])
    assert pool.find([b"a", b"b"]) == [first, second]
    # 4 is free since ever, 3 was registered by nobody's leave, then comes 2.
    assert pool.allocate(2) == [4, third] and pool.find([b"a", b"b"]) == [first, second]
    assert pool.allocate(1) == [second] and pool.find([b"a", b"b"]) == [first]
    pool.share(first)
    pool.forget()
    assert pool.find([b"a"]) == [] and pool.ref_count(first) == 1
    pool.register([first], [b"c"])
    assert pool.find([b"c"]) == [first]


class PoolAgainstLists(RuleBasedStateMachine):
    """The model: a Python list as the queue, every reference that somebody holds, and what is in the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13)
        self.queue = list(range(1, 13))
        self.held: list[int] = []
        self.holds: dict[bytes, int] = {}

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        assert self.pool.allocate(count) == self.queue[:count]
        self.held += self.queue[:count]
        taken = set(self.queue[:count])
        self.holds = {key: block for key, block in self.holds.items() if block not in taken}
        del self.queue[:count]

    @rule(block=st.integers(1, 12))
    def share(self, block: int) -> None:
        self.pool.share(block)
        self.held.append(block)
        if block in self.queue:
            self.queue.remove(block)

    @precondition(lambda self: set(self.held) - set(self.holds.values()))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def register(self, data: st.DataObject, key: bytes) -> None:
        unregistered = sorted(set(self.held) - set(self.holds.values()))
        block = data.draw(st.sampled_from(unregistered))
        self.pool.register([block], [key])
        self.holds.setdefault(key, block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.holds = {}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.held))))
        some = order[: data.draw(st.integers(1, len(order)))]
        blocks = [self.held[i] for i in some]
        self.pool.free(blocks)
        self.held = [b for i, b in enumerate(self.held) if i not in set(some)]
        last_use = {block: i for i, block in enumerate(blocks) if block not in self.held}
        self.queue += sorted(last_use, key=last_use.__getitem__)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        with pytest.raises(RuntimeError):
            self.pool.free([data.draw(st.sampled_from(self.queue))])

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_queue() == self.queue
        assert self.pool.num_free == len(self.queue)
        for block in range(1, 13):
            assert self.pool.ref_count(block) == self.held.count(block)
        for key in (b"a", b"b", b"c", b"d", b"e"):
            assert self.pool.find([key]) == ([self.holds[key]] if key in self.holds else [])


PoolAgainstLists.TestCase.settings = settings(
    max_examples=125, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestPoolAgainstLists = PoolAgainstLists.TestCase
