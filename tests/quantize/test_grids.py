import ml_dtypes
import numpy as np
import pytest
import torch

from jaxinfer.quantize.grids import round_to_e4m3, round_to_int4, round_to_int8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("scale_dtype", [np.dtype(np.float16), BFLOAT16])
def test_int4_is_the_nearest_point_of_the_stored_grid(group_size, scale_dtype):
    w = weight(24, 128) * np.geomspace(1e-4, 50, 24, dtype=np.float32)[:, None]
    w[3], w[5] = np.abs(w[3]), -np.abs(w[5])  # groups that lie on one side of zero
    rounded = round_to_int4(w, group_size, scale_dtype)
    assert rounded.scales.dtype == scale_dtype
    zeros, scales = (
        np.repeat(np.asarray(x), group_size, 1) for x in (rounded.zeros, rounded.scales)
    )
    points = (np.arange(16) - zeros[..., None].astype(np.float64)) * scales.astype(np.float64)[
        ..., None
    ]
    nearest = np.abs(points - w[..., None]).min(-1)
    error = np.abs(np.asarray(rounded.values(), np.float64) - w)
    assert np.all(error <= nearest * (1 + 1e-5) + 1e-6 * np.abs(w))
    assert np.asarray(rounded.codes).max() == 15 and np.asarray(rounded.codes).min() == 0
    groups = w.reshape(24, -1, group_size)
    spread = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    np.testing.assert_allclose(np.asarray(rounded.scales, np.float64), spread / 15, rtol=2**-8)


def test_int4_of_zeros_is_zero():
    assert not np.asarray(round_to_int4(np.zeros((8, 32), np.float32), 32).values()).any()


def test_int8_of_a_row_is_within_half_a_step():
    w = weight(16, 40)
    w[3] = 0
    codes, scales = round_to_int8(w, np.dtype(np.float32))
    assert (codes.dtype, scales.shape) == (np.int8, (16, 1))
    np.testing.assert_allclose(scales[4], np.abs(w[4]).max() / 127, rtol=1e-6)
    assert np.all(np.abs(codes * scales - w) <= scales / 2 * (1 + 1e-4))
    codes, scales = round_to_int8(w, BFLOAT16)
    assert scales.dtype == BFLOAT16
    assert np.all(np.abs(codes * scales.astype(np.float32) - w) <= 0.75 * scales.astype(np.float32))


def test_fp8_is_what_torch_makes_of_the_scaled_weights():
    w = weight(16, 40)
    w[3] = 0
    codes, scales = round_to_e4m3(w, BFLOAT16)
    scaled = torch.from_numpy(w / scales.astype(np.float32)).clamp(-448, 448)
    expected = scaled.to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(codes.astype(np.float32), expected)
    assert np.abs(codes.astype(np.float32)).max() == 448
