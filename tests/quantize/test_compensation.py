import numpy as np
import pytest

from jaxinfer.quantize.compensation import round_compensated
from jaxinfer.quantize.search import InputMoments

GROUP = 32
NUM_TOKENS = 3000


def case(num_inputs: int):
    """Weights [O, I] and correlated inputs [T, I] of uneven size."""
    rng = np.random.default_rng(num_inputs)
    w = rng.standard_normal((12, num_inputs), np.float32)
    mix = rng.standard_normal((num_inputs, num_inputs)) / num_inputs**0.5
    x = (
        rng.standard_normal((NUM_TOKENS, num_inputs))
        @ (mix + 0.3)
        * rng.lognormal(0, 1, num_inputs)
    )
    return w, (x.T @ x).astype(np.float32)


def moments_of(products: np.ndarray) -> InputMoments:
    return InputMoments(products, np.ones(len(products), np.float32), np.float32(NUM_TOKENS))


def grids_of(w: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Zeros and scales [O, I/g], from `share` of the least weight to as much of the greatest."""
    groups = w.reshape(len(w), -1, GROUP)
    low, high = (f(groups, -1, initial=0.0) * share for f in (np.min, np.max))
    scales = ((high - low) / 15).astype(np.float16)
    return np.clip(np.rint(-low / scales), 0, 15).astype(np.uint8), scales


def reference(
    w: np.ndarray, products: np.ndarray, zeros: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Column by column in float64: after each, the weights that are left move to where they make the error least."""
    left, moments = w.astype(np.float64), products.astype(np.float64)
    moments = moments + max(0.01, w.shape[1] / NUM_TOKENS / 4) * np.diag(np.diag(moments))
    result = np.zeros_like(left)
    for j in range(w.shape[1]):
        zero, scale = (grid[:, j // GROUP].astype(np.float64) for grid in (zeros, scales))
        code = np.clip(np.rint(left[:, j] / scale) + zero, 0, 15)
        result[:, j] = (code - zero) * scale
        rest = slice(j + 1, None)
        if j + 1 < w.shape[1]:
            shift = np.linalg.solve(moments[rest, rest], moments[rest, j])
            left[:, rest] += np.outer(left[:, j] - result[:, j], shift)
    return result


def output_error(w: np.ndarray, approximate: np.ndarray, products: np.ndarray) -> float:
    difference = approximate.astype(np.float64) - w
    return float(np.trace(difference @ products @ difference.T))


@pytest.mark.parametrize("num_inputs", [32, 96])
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_later_columns_make_up_for_earlier_ones(num_inputs, share):
    w, products = case(num_inputs)
    grids = grids_of(w, share)
    found = np.asarray(round_compensated(w, moments_of(products), *grids, GROUP).values())
    expected = reference(w, products, *grids)
    # A weight near the middle of two points may go to another in float32, and then all after it differ.
    same = np.isclose(found, expected, rtol=1e-5, atol=1e-6)
    assert same.mean() > 0.9 and same[:, :GROUP].mean() > 0.97
    error = output_error(w, found, products)
    assert error == pytest.approx(output_error(w, expected, products), rel=0.05)
    plain = reference(w, np.diag(np.diag(products)), *grids)
    assert error < 0.6 * output_error(w, plain, products)


def test_an_input_that_the_text_never_has_is_rounded_by_itself():
    w, products = case(32)
    products[5], products[:, 5] = 0, 0
    grids = grids_of(w, 1.0)
    found = np.asarray(round_compensated(w, moments_of(products), *grids, GROUP).values())
    assert np.isfinite(found).all()
    steps = (w.max(1) - w.min(1)) / 15
    assert np.all(np.abs(found[:, 5] - w[:, 5]) <= 0.51 * steps)
