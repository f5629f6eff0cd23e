"""Attention whose bits don't depend on the batch: the same token among others, as a lone one and in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import ragged_paged_attention
from tests.kernels_pallas.paged_batches import Geometry, check_result, make_batch

pytestmark = pytest.mark.usefixtures("optimized_programs")
T, R, PAGE, PAGES = 32, 8, 16, 16
KV_HEADS, GROUP, HEAD = 3, 3, 24
LENGTHS = (200, 131, 64, 17, 16, 1)


class Requests:
    """Contexts in pages of their own, with a query for each position."""

    def __init__(self, dtype):
        rng = np.random.default_rng(2)
        shape = (len(LENGTHS) * PAGES + 1, KV_HEADS, PAGE, HEAD)
        self.kv_pages = tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
        self.tables = 1 + rng.permutation(len(LENGTHS) * PAGES).reshape(len(LENGTHS), PAGES)
        self.queries = rng.normal(size=(len(LENGTHS), max(LENGTHS), KV_HEADS * GROUP, HEAD))
        self.dtype = dtype

    def attend(self, program, pieces):
        """`pieces` of (request, first position, number of tokens) -> the results of each piece's tokens."""
        q = np.full((T, KV_HEADS * GROUP, HEAD), 7.0)
        tables, seq_lens = np.zeros((R, PAGES), np.int32), np.zeros(R, np.int32)
        starts, token = np.zeros(R + 1, np.int32), 0
        for row, (request, first, count) in enumerate(pieces):
            q[token : token + count] = self.queries[request, first : first + count]
            tables[row], seq_lens[row] = self.tables[request], first + count
            token += count
            starts[row + 1 :] = token
        out = np.asarray(
            program(jnp.asarray(q, self.dtype), self.kv_pages, tables, seq_lens, starts)
        )
        return [out[starts[row] : starts[row + 1]] for row in range(len(pieces))]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {}), ("float32", {}), ("bfloat16", {"sliding_window": 37, "soft_cap": 2.0})],
)
def test_equal_bits_wherever_a_token_is(dtype, options):
    requests = Requests(dtype)
    program = jax.jit(
        functools.partial(ragged_paged_attention, scale=0.2, batch_invariant=True, **options)
    )
    alone = {
        (request, position): requests.attend(program, [(request, position, 1)])[0].tobytes()
        for request, length in enumerate(LENGTHS)
        for position in sorted({0, 15, 16, 63, 64, 65, length // 2, length - 1})
        if position < length
    }
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(60):
        pieces, left = [], T
        for request in rng.permutation(len(LENGTHS)).tolist()[:R]:
            count = int(rng.integers(1, min(left, LENGTHS[request], 20) + 1))
            pieces.append((request, int(rng.integers(0, LENGTHS[request] - count + 1)), count))
            left -= count
            if not left:
                break
        for (request, first, count), results in zip(
            pieces, requests.attend(program, pieces), strict=True
        ):
            for i in range(count):
                if (bits := alone.get((request, first + i))) is not None:
                    assert results[i].tobytes() == bits
                    compared += 1
    assert compared > 200


def test_it_is_attention():
    """Against float64; `check_result` knows what a token of no request gets."""
    geometry = Geometry(16, 2, 3, 32, sinks=True, kv_dtype="int8")
    rows = [(83, 1), (200, 97), (0, 0), (161, 30)]
    batch = make_batch(geometry, rows, tokens=160, pages_per_row=14, num_pages=100, seed=0)
    arrays, keywords = batch.arrays("bfloat16")
    attend = functools.partial(
        ragged_paged_attention, **geometry.options, batch_invariant=True, return_lse=True
    )
    check_result(jax.jit(attend)(*arrays, **keywords), batch, geometry, "bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "reference"}, 'implementation "reference" can\'t be batch_invariant'),
        (
            {"implementation": "mosaic_gpu", "sliding_window": 5},
            "does not take this call: batch_invariant with a sliding_window",
        ),
    ],
)
def test_what_can_not_be_is_refused(options, message):
    q, pages = jnp.zeros((2, 2, 64), "bfloat16"), jnp.zeros((3, 1, 16, 64), "bfloat16")
    rows = np.array([[1, 2]]), np.array([3]), np.array([0, 2])
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(
            q,
            (pages, pages),
            *(x.astype(np.int32) for x in rows),
            scale=1.0,
            batch_invariant=True,
            **options,
        )
