"""What matmuls hand on, by the platform that a model is built for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.layers import linear, num_partial_sums, product_dtype
from jaxinfer.parallel.mesh import MODEL_AXIS
from kernels_pallas.gpu_target import device_mesh, get_target
from tests.gpu_compiler import needs_compiler


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cpu_keeps_float32(dtype):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), (MODEL_AXIS,))
    assert product_dtype(mesh, jnp.dtype(dtype)) == jnp.float32


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_writes_no_more_bytes_than_the_weights_dtype_has(dtype):
    assert product_dtype(device_mesh("h200"), jnp.dtype(dtype)) == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_rounded_once_after_adding_up_in_float32(dtype):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(4, 2, 512)), rng.normal(size=(3, 5, 2, 512))
    x, weight = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight))
    exact = np.einsum("tab,oiab->toi", *(np.asarray(a, np.float64) for a in (x, weight)))
    product = linear(x, weight, jnp.dtype(dtype), num_in_axes=2)
    assert (product.shape, product.dtype) == ((4, 3, 5), dtype)
    tolerance = {"bfloat16": 2**-8, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(np.asarray(product, np.float64), exact, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("num_in_axes", [1, 2])
def test_partial_sums_add_up_to_the_product(num_in_axes):
    rng = np.random.default_rng(1)
    in_shape = (4, 64)[-num_in_axes:]
    x, weight = rng.normal(size=(5, *in_shape)), rng.normal(size=(7, *in_shape))
    x, weight = (jnp.asarray(a, jnp.bfloat16) for a in (x, weight))
    exact = (
        np.asarray(x, np.float64).reshape(5, -1) @ np.asarray(weight, np.float64).reshape(7, -1).T
    )
    parts = linear(x, weight, jnp.bfloat16, num_in_axes, num_partial_sums=4)
    assert (parts.shape, parts.dtype) == ((4, 5, 7), jnp.float32)
    np.testing.assert_allclose(np.asarray(parts, np.float64).sum(0), exact, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 4096, 4096), 4),  # 8B's output projection
        ((64, 4096, 14_336), 4),
        ((1, 4096, 14_336), 4),
        ((64, 2048, 2048), 4),  # no part under 512
        ((64, 2048, 8192), 8),
        ((64, 2048, 8200), 8),
        ((64, 2048, 8193), 1),
        ((128, 4096, 14_336), 2),
        ((1024, 4096, 14_336), 1),
        ((64, 16_384, 16_384), 1),
    ],
)
def test_a_decode_step_has_a_tile_for_each_core(sizes, expected):
    assert num_partial_sums(device_mesh("h200", 1, MODEL_AXIS), *sizes) == expected


@needs_compiler
def test_nothing_is_cut_between_devices_on_other_gpus_or_on_a_cpu():
    a100 = replace(get_target("h100"), name="a100", device_name="NVIDIA A100-SXM4-80GB")
    cpu = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), (MODEL_AXIS,))
    for mesh in (device_mesh("h200", 4, MODEL_AXIS), device_mesh(a100, 1, MODEL_AXIS), cpu):
        assert num_partial_sums(mesh, 64, 4096, 14_336) == 1
