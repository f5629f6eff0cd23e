"""How layers are put into groups that take their pages together."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from jaxinfer.models.cache_groups import CacheGroups, choose_groups
from jaxinfer.models.cache_spec import KV_PAGE_AXES, PAGE_SIZE, CacheArray, LayerCache

PAGES = CacheArray((2, PAGE_SIZE, 8), KV_PAGE_AXES, np.dtype(np.float32))
LONG = 1 << 20


def caches(*windows: int | None) -> list[LayerCache]:
    return [LayerCache((PAGES, PAGES), window) for window in windows]


def five_to_one(num_layers: int, window: int = 512) -> list[LayerCache]:
    return caches(*(None if i % 6 == 5 else window for i in range(num_layers)))


def test_a_page_of_a_layer() -> None:
    assert PAGES.page_shape(16) == (2, 16, 8)
    assert caches(None)[0].token_bytes == 2 * 2 * 8 * 4


@pytest.mark.parametrize("window", [None, 7])
def test_layers_of_one_kind_are_one_group(window: int | None) -> None:
    groups = choose_groups(caches(*[window] * 5), LONG)
    assert groups == CacheGroups((window,), (tuple(range(5)),))
    assert groups == CacheGroups.single(5, window)
    assert groups.places() == [(0, i) for i in range(5)]


@pytest.mark.parametrize(
    ("num_layers", "num_full", "num_windowed"),
    # Gemma 3: 270M, 1B, 4B, 12B, 27B. The last group of windowed layers may have fewer.
    [(18, 3, 5), (26, 4, 6), (34, 5, 6), (48, 8, 5), (62, 10, 6)],
)
def test_gemma(num_layers: int, num_full: int, num_windowed: int) -> None:
    groups = choose_groups(five_to_one(num_layers), LONG)
    assert groups.size == num_full
    assert groups.windows == (None,) + (512,) * num_windowed
    assert groups.layers[0] == tuple(range(5, num_layers, 6))
    assert groups.layers[1] == tuple(i for i in range(num_layers) if i % 6 != 5)[:num_full]
    assert sorted(sum(groups.layers, ())) == list(range(num_layers))
    for layer, (group, place) in enumerate(groups.places()):
        assert groups.layers[group][place] == layer


def test_alternating_layers_are_two_groups() -> None:
    groups = choose_groups(caches(*[128, None] * 12), LONG)
    assert groups.windows == (None, 128) and groups.size == 12


def test_a_window_as_long_as_any_request_is_none() -> None:
    assert choose_groups(five_to_one(12), 512) == CacheGroups.single(12)
    assert len(choose_groups(five_to_one(12), 513).windows) > 1


def test_few_windowed_layers_are_not_worth_a_group_of_their_own() -> None:
    assert choose_groups(caches(64, *[None] * 20), LONG) == CacheGroups.single(21)


def test_pages_of_different_sizes_are_in_one_group() -> None:
    wide = CacheArray((4, PAGE_SIZE, 8), KV_PAGE_AXES, np.dtype(np.float32))
    mixed = [LayerCache((wide, wide)), *caches(16, 16)]
    assert choose_groups(mixed, LONG) == CacheGroups.single(3)


def test_two_windows_and_no_layer_that_sees_all() -> None:
    groups = choose_groups(caches(8, 64, 64, 8), LONG)
    assert groups.windows == (8, 64) and groups.layers == ((0, 3), (1, 2))
    # Where it isn't worth it, all keep what the widest window needs.
    assert choose_groups(caches(63, *[64] * 9), LONG) == CacheGroups.single(10, 64)


@pytest.mark.parametrize("num_layers", range(1, 8))
def test_groups_never_take_more_than_layers_by_themselves(num_layers: int) -> None:
    """All patterns of a short window, a long one and none."""
    for windows in product([None, 4, 32], repeat=num_layers):
        groups = choose_groups(caches(*windows), LONG)
        assert sorted(sum(groups.layers, ())) == list(range(num_layers))
        assert None not in groups.windows[1:]
        for window, layers in zip(groups.windows, groups.layers, strict=True):
            of_group = {windows[layer] for layer in layers}
            if len(groups.windows) > 1:
                assert of_group == {window}
            else:
                assert window == (None if None in of_group else max(of_group))
        widest = max((w for w in windows if w), default=1)
        kept = [8 * widest if w is None else w for w in groups.windows]
        alone = 8 * widest if None in windows else widest
        assert groups.size * sum(kept) <= num_layers * alone
