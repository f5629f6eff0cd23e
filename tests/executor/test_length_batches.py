from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.executor.length_batches import LengthBatches, length_rungs


def test_lengths_grow_by_at_most_a_half_and_end_with_the_longest():
    assert length_rungs(256) == [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256]
    assert length_rungs(50) == [8, 12, 16, 24, 32, 40, 48, 50]
    assert length_rungs(7) == [7]


@pytest.mark.parametrize("max_texts", [1, 3, 64])
def test_every_text_is_in_one_batch_of_a_known_shape_that_holds_it(max_texts):
    batches = LengthBatches.create(200, max_texts, "cpu")
    shapes = set(batches.all_shapes())
    rng = np.random.default_rng(0)
    for number in (1, 2, 3, 7, 40):
        lengths = np.minimum(1 + rng.geometric(0.03, number), 200)
        seen = []
        for (rows, length), chosen in batches.split(lengths):
            assert (rows, length) in shapes and rows <= max_texts and rows * length <= 512
            assert 0 < len(chosen) <= rows and lengths[chosen].max() <= length
            assert 3 * len(chosen) >= 2 * rows
            seen += chosen.tolist()
        assert sorted(seen) == list(range(number))


def test_little_of_many_texts_is_padding():
    lengths = np.clip(np.random.default_rng(1).lognormal(3, 0.8, 256).astype(int), 1, 256)
    shapes = [shape for shape, _ in LengthBatches.create(256, 256, "cpu").split(lengths)]
    assert sum(rows * length for rows, length in shapes) < 1.25 * lengths.sum()
