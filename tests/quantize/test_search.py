import numpy as np
import pytest

from jaxinfer.quantize.search import InputMoments, best_grids, find_scale

GROUP = 32


def case(num_rows: int = 16, num_inputs: int = 64, seed: int = 0):
    """Weights [O, I], inputs [T, I] of which some are much larger than others, and their moments."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((num_rows, num_inputs), np.float32)
    x = rng.standard_normal((200, num_inputs), np.float32) * rng.lognormal(0, 1.5, num_inputs)
    x = x.astype(np.float32)
    return w, x, InputMoments(x.T @ x, np.abs(x).sum(0), len(x))


def rounded(w: np.ndarray) -> np.ndarray:
    """To the nearest of 16 points, float64 but for the scales, which are float16."""
    groups = w.astype(np.float64).reshape(len(w), -1, GROUP)
    low, high = (f(groups, -1, keepdims=True, initial=0.0) for f in (np.min, np.max))
    scale = ((high - low) / 15).astype(np.float16).astype(np.float64)
    zero = np.clip(np.rint(-low / scale), 0, 15)
    codes = np.clip(np.rint(groups / scale) + zero, 0, 15)
    return ((codes - zero) * scale).reshape(w.shape)


def output_error(w: np.ndarray, approximate: np.ndarray, x: np.ndarray) -> float:
    return float((((approximate - w) @ x.T.astype(np.float64)) ** 2).sum())


@pytest.mark.parametrize("per_channel", [1, 2])
def test_the_errors_are_those_of_the_outputs(per_channel):
    w, x, moments = case()
    channels = np.repeat(np.arange(64 // per_channel), per_channel)
    found = find_scale(w, moments, channels, GROUP)
    assert found.scale.shape == (64 // per_channel,)
    scale = found.scale[channels].astype(np.float64)
    # A weight that lies between two points may fall to either side in another precision.
    assert found.plain_error == pytest.approx(output_error(w, rounded(w), x), rel=0.02)
    assert found.error == pytest.approx(output_error(w, rounded(w * scale) / scale, x), rel=0.02)
    assert found.error < 0.7 * found.plain_error


def test_inputs_of_equal_size_leave_weights_alone_or_better():
    w, _, _ = case()
    x = np.random.default_rng(1).choice([-1, 1], (400, 64)).astype(np.float32)
    found = find_scale(w, InputMoments(x.T @ x, np.abs(x).sum(0), len(x)), np.arange(64), GROUP)
    assert found.error <= found.plain_error


def test_moments_of_scaled_inputs_are_those_of_the_inputs_scaled():
    _, x, moments = case()
    scale = np.random.default_rng(2).uniform(0.5, 2, 64).astype(np.float32)
    scaled, y = moments.divided_by(scale), x / scale
    np.testing.assert_allclose(scaled.products, y.T @ y, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(scaled.magnitudes, np.abs(y).sum(0), rtol=1e-4)


def test_each_grid_ends_where_its_own_error_is_least():
    w, x, moments = case(num_rows=4)
    w[0, 5], w[1, 40] = 9, -7  # outliers
    groups = w.reshape(4, 2, GROUP)
    zeros, scales = map(
        np.asarray, best_grids(groups, moments.products, scale_dtype=np.dtype(np.float16))
    )
    for row in range(4):
        for n in range(2):
            group, x_n = groups[row, n], x[:, n * GROUP : (n + 1) * GROUP]

            def error(zero: float, scale: float, group=group, x_n=x_n) -> float:
                codes = np.clip(np.rint(group / scale) + zero, 0, 15)
                return output_error(group, (codes - zero) * scale, x_n)

            width = max(group.max(), 0) - min(group.min(), 0)
            tried = [
                error(zero, float(np.float16(share * width / 15)))
                for zero in range(16)
                for share in np.arange(0.6, 1.05, 0.01)
            ]
            found = error(float(zeros[row, n]), float(scales[row, n]))
            plain = output_error(group, rounded(group[None])[0], x_n)
            assert found < 0.97 * plain and found <= 1.25 * min(tried)
    # What is larger than all others is left out.
    assert 15 * scales[0, 0] < 0.8 * np.ptp(groups[0, 0])
