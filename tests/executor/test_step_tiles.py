"""A step's tiles against a token-by-token reading of its plan."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.plan import AdmittedRow, StepPlan
from jaxinfer.executor.step_tiles import cut_into_tiles
from jaxinfer.sampling_params import SamplingParams

NONE = np.empty(0, np.int32)


@st.composite
def plans(draw):
    """Rows of one token first, as the scheduler sends them; any of them may be new."""
    n = draw(st.integers(1, 12))
    counts = sorted(
        draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)), key=lambda c: c != 1
    )
    rows = draw(st.permutations(range(20)))[:n]
    computed = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    samples = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    new = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return StepPlan(
        admitted=[
            AdmittedRow(row, np.zeros(100, np.int32), 100, SamplingParams())
            for row, is_new in zip(rows, new, strict=True)
            if is_new
        ],
        rows=np.array(rows, np.int32),
        num_scheduled=np.array(counts, np.int32),
        num_computed=np.array(computed, np.int32),
        samples=np.array(samples),
        block_rows=NONE,
        block_cols=NONE,
        block_ids=NONE,
    )


@settings(max_examples=200, deadline=None)
@given(plans(), st.sampled_from([1, 4, 16]))
def test_every_token_is_in_one_tile_and_none_before_those_it_may_read(plan, tile_tokens):
    tiles = cut_into_tiles(plan, tile_tokens)
    sizes = [tile.plan.num_tokens for tile in tiles]
    assert sizes[:-1] == [tile_tokens] * (len(tiles) - 1)
    assert 1 <= sizes[-1] <= tile_tokens
    new = {admitted.row for admitted in plan.admitted}
    seen, sampled, latest_start = [], [], -1
    start_of = dict(zip(plan.rows.tolist(), plan.num_computed.tolist(), strict=True))
    for part, index in tiles:
        assert (part.num_scheduled > 0).all()
        assert (plan.rows[index] == part.rows).all()
        position = 0
        for r, row in enumerate(part.rows.tolist()):
            first, count = int(part.num_computed[r]), int(part.num_scheduled[r])
            seen += [(row, p) for p in range(first, first + count)]
            if part.samples[r]:
                sampled.append((row, first + count))
            waits_for_nobody = plan.num_scheduled[index[r]] == 1 and row not in new
            if waits_for_nobody:
                assert latest_start == -1  # nothing else has come before
                assert position == r  # where the device looks for the row's last token
            else:
                # What a row reads of others in this step is of rows that begin before it.
                assert start_of[row] >= latest_start
                latest_start = start_of[row]
            position += count
    assert sorted(seen) == sorted(
        (row, position)
        for row, computed, count in zip(
            plan.rows.tolist(), plan.num_computed, plan.num_scheduled, strict=True
        )
        for position in range(computed, computed + count)
    )
    assert sorted(sampled) == sorted(
        (int(row), int(computed + count))
        for row, computed, count, samples in zip(
            plan.rows, plan.num_computed, plan.num_scheduled, plan.samples, strict=True
        )
        if samples
    )
