import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.weights.gguf_file import TENSOR_TYPES
from jaxinfer.weights.gguf_quants import CHUNK_ELEMENTS, dequantize_rows


def random_blocks(type_name: str, rows: int, columns: int) -> np.ndarray:
    """Random bytes [rows, bytes]; the bits of every float16 stay below infinity's exponent."""
    rng = np.random.default_rng(0)
    _, block, block_bytes = next(t for t in TENSOR_TYPES.values() if t[0] == type_name)
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    return (raw & 0xBF if block == 1 else _finite(type_name, raw)).reshape(rows, -1)


def _finite(type_name: str, raw: np.ndarray) -> np.ndarray:
    scales = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}.get(type_name, [0, 2])
    for start in scales:
        raw[..., start + 1] &= 0xBB
    return raw


@pytest.mark.parametrize("type_name", [name for name, _, _ in TENSOR_TYPES.values()])
def test_every_type_equals_the_gguf_package_bit_by_bit(type_name):
    rows, columns = 3 + CHUNK_ELEMENTS // 512, 512
    raw = random_blocks(type_name, rows, columns)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]).reshape(rows, columns)
    assert np.isfinite(expected).all()
    out = np.empty((rows, columns), np.float32)
    dequantize_rows(type_name, raw, out)
    np.testing.assert_array_equal(out.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_block_sizes_are_those_of_the_gguf_package():
    for code, (name, block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(code)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block, block_bytes)


def test_writes_the_callers_dtype_rounded_to_nearest_even():
    raw = random_blocks("Q4_1", 4, 256)
    exact = np.empty((4, 256), np.float32)
    rounded = np.empty((4, 256), ml_dtypes.bfloat16)
    dequantize_rows("Q4_1", raw, exact)
    dequantize_rows("Q4_1", raw, rounded)
    np.testing.assert_array_equal(rounded, exact.astype(ml_dtypes.bfloat16))
