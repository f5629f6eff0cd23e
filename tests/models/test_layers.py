"""What matmuls hand on, by the platform that a model is built for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.layers import linear, product_dtype
from jaxinfer.parallel.mesh import MODEL_AXIS
from kernels_pallas.gpu_target import device_mesh, missing_compiler

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


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
