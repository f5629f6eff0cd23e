"""Times the quantized matmul on this machine beside the dot of the same weight in 16 and 32 bits.

A case runs several weights one after another in one jitted step, as a model does, so that they don't stay in the
processor's caches. Minima over repetitions, cases interleaved.

    python benchmarks/quantized_matmul.py [--shape 4096 2048] [--rows 1 8 64 256 1024] [--formats "q4 g128" ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import QuantizedWeight, WeightFormat, quantized_matmul

FORMATS = {
    "q4 g128": WeightFormat("uint4", 128, zeros=True, pack_block=64),
    "q4_1 g32": WeightFormat("uint4", 32, minima="float16", pack_block=64),
    "q4_k": WeightFormat(
        "uint4", 32, scales="uint8", minima="uint8", super_group_size=256, pack_block=64
    ),
    "q5_k": WeightFormat(
        "uint5", 32, scales="uint8", minima="uint8", super_group_size=256, pack_block=64
    ),
    "q6_k": WeightFormat("uint6", 16, scales="int8", zero=32, super_group_size=256, pack_block=64),
    "q8_0": WeightFormat("int8", 32),
    "int8": WeightFormat("int8", None, scales="float32"),
    "int8 x int8": WeightFormat("int8", None, scales="float32", activation="int8"),
    "fp8": WeightFormat("e4m3", None, scales="float32"),
    "fp8 blocks": WeightFormat("e4m3", 128, scales="float32"),
    "fp8 x fp8": WeightFormat("e4m3", None, scales="float32", activation="e4m3"),
    "mxfp4": WeightFormat("e2m1", 32, scales="float8_e8m0fnu", pack_block=64),
    "nf4": WeightFormat("nf4", 64, scales="float32", pack_block=64),
}
DENSE = ("bfloat16", "float32")
_TOTAL_BYTES = 256 << 20
"""Of all weights of a case in bfloat16: more than a processor's caches hold."""


def random_weight(format: WeightFormat, shape: tuple[int, int], seed: int) -> QuantizedWeight:
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, want in format.arrays(shape).items():
        if want.dtype.kind in "iu":
            # Exponents of two are about 2 ** 0, bits of FP8 no NaN.
            values = rng.integers(0, 120, want.shape)
        else:
            values = 0.01 * rng.random(want.shape)
        arrays[name] = jnp.asarray(values.astype(want.dtype))
    return QuantizedWeight(format, **arrays)


def step_of(weights: list, x_mk: jax.Array, name: str) -> Callable[[], None]:
    """Every product is made from an input that depends on the one before."""

    @jax.jit
    def step(x_mk: jax.Array, weights: list) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for weight in weights:
            x = x_mk + (total * 1e-30).astype(x_mk.dtype)
            total = multiply(x, weight)[0, 0]
        return total

    def multiply(x: jax.Array, weight: jax.Array | QuantizedWeight) -> jax.Array:
        if name not in DENSE:
            return quantized_matmul(x, weight)
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            x.astype(weight.dtype), weight, dims, preferred_element_type=jnp.float32
        )

    compiled = step.lower(x_mk, weights).compile()
    return lambda: jax.block_until_ready(compiled(x_mk, weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 2048), metavar=("N", "K"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--formats", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--dtype", choices=DENSE, default="bfloat16", help="of the activations")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each case")
    args = parser.parse_args()
    shape = tuple(args.shape)
    count = max(_TOTAL_BYTES // (2 * shape[0] * shape[1]), 1)
    print(f"{jax.devices()[0].device_kind}, weights {shape}, rows of {args.dtype}, ms a product")
    print(f"{'rows':>5s} " + " ".join(f"{name:>12s}" for name in (*DENSE, *args.formats)))
    key = jax.random.key(0)
    weights = {
        name: [jax.random.normal(jax.random.fold_in(key, i), shape, name) for i in range(count)]
        for name in DENSE
    }
    weights |= {
        name: [random_weight(FORMATS[name], shape, i) for i in range(count)]
        for name in args.formats
    }
    for rows in args.rows:
        x_mk = jax.random.normal(key, (rows, shape[1]), args.dtype)
        steps = {name: step_of(these, x_mk, name) for name, these in weights.items()}
        best = dict.fromkeys(steps, float("inf"))
        for step in steps.values():
            step()
        stop = time.perf_counter() + args.seconds * len(steps)
        while time.perf_counter() < stop:
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                best[name] = min(best[name], (time.perf_counter() - begin) / count)
        print(f"{rows:5d} " + " ".join(f"{1e3 * best[name]:12.3f}" for name in best), flush=True)


if __name__ == "__main__":
    main()
