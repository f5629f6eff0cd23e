"""The oracle of the block pool's picture: every block by itself, from the tables of those that run."""

from __future__ import annotations

from collections import Counter

from jaxinfer.engine.core import EngineCore

STATES = ("free", "cached", "in_use", "shared")


def states_by_hand(core: EngineCore) -> list[str]:
    """Of blocks 1, 2 …: from the tables of the requests that run, and from what can be found."""
    kv = core.scheduler.kv
    holders: Counter[int] = Counter()
    for request in core.scheduler.running:
        for group in kv.block_tables:
            columns = group[request.row, : kv.num_blocks[request.row]].tolist()
            holders.update(block for block in columns if block)
    findable = {block for block, key in enumerate(kv.pool._key_of) if key is not None}
    names = []
    for block in range(1, kv.pool.num_blocks):
        held = holders[block]
        idle = "cached" if block in findable else "free"
        names.append(idle if not held else "in_use" if held == 1 else "shared")
    return names


def check_blocks(core: EngineCore, picture: dict) -> list[str]:
    expected = states_by_hand(core)
    blocks, cells = picture["blocks"], picture["blocks"]["cells"]
    assert {name: blocks[name] for name in STATES} == {n: expected.count(n) for n in STATES}
    assert blocks["num_blocks"] == len(expected)
    each = cells["blocks_per_cell"]
    parts = [expected[i : i + each] for i in range(0, len(expected), each)]
    for name in STATES:
        assert cells[name] == [part.count(name) for part in parts]
    return expected
