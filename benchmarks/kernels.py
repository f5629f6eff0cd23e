"""Times paged attention and the KV cache update on this machine: milliseconds per layer beside the bytes floor.

A case runs several layers with caches of their own in one jitted step, as a model does, so that the caches don't stay
in the processor's. The floor is the time to read the keys and values of the contexts once at the bandwidth measured
in the same run (or, for the update, to write the new ones). Minima over repetitions, cases interleaved.

    python benchmarks/kernels.py [--dtype bfloat16] [--layers 6] [--seconds 2] [--only decode] [--grep 64]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import (
    SharedPrefixes,
    kv_cache_update,
    ragged_paged_attention,
    shared_prefix_attention,
)
from kernels_pallas.quantized_pages import quantize

PAGE_SIZE = 16
PAGES_PER_ROW = 512
MIXED_CONTEXTS = tuple(np.random.default_rng(0).integers(32, 321, 64).tolist())
PROMPTS = (32, 64, 96, 128, 160, 192, 224, 128)


@dataclass(frozen=True)
class Heads:
    name: str
    kv: int
    group: int
    size: int


SMOLLM2 = Heads("SmolLM2 3x3x64", 3, 3, 64)
GEMMA3 = Heads("Gemma 3 1x4x256", 1, 4, 256)
QWEN3 = Heads("Qwen3 8x4x128", 8, 4, 128)


@dataclass(frozen=True)
class Attention:
    """`rows`: (context, query tokens) per request, padded to num_rows and num_tokens. All begin with the same `shared`
    tokens, which `together` reads once for all of them."""

    label: str
    heads: Heads
    rows: tuple[tuple[int, int], ...]
    num_rows: int
    num_tokens: int
    kv_dtype: str | None = None
    """None: that of the queries."""
    sinks: bool = False
    return_lse: bool = False
    shared: int = 0
    together: bool = False

    @property
    def decode_only(self) -> bool:
        return self.num_rows == self.num_tokens

    @property
    def suite(self) -> str:
        if self.shared:
            return "shared"
        return "decode" if self.decode_only else "prefill"


def decode(heads: Heads, label: str, contexts: tuple[int, ...], num_rows: int) -> Attention:
    rows = tuple((context, 1) for context in contexts)
    return Attention(f"decode {label}", heads, rows, num_rows, num_rows)


def shared_decode(
    heads: Heads, num_rows: int, shared: int, own: int
) -> tuple[Attention, Attention]:
    """Each request by itself, and all together."""
    by_itself = Attention(
        f"decode {num_rows} x ({shared} shared + {own})",
        heads,
        ((shared + own, 1),) * num_rows,
        num_rows,
        num_rows,
        shared=shared,
    )
    together = replace(by_itself, label=f"{by_itself.label}, read once", together=True)
    return by_itself, together


ATTENTION = (
    decode(SMOLLM2, "64 x 32..320", MIXED_CONTEXTS, 64),
    decode(SMOLLM2, "8 x 32..320", MIXED_CONTEXTS[:8], 8),
    decode(SMOLLM2, "1 x 160", (160,), 2),
    decode(SMOLLM2, "1 x 7000", (7000,), 2),
    decode(GEMMA3, "64 x 32..320", MIXED_CONTEXTS, 64),
    decode(GEMMA3, "1 x 160", (160,), 2),
    decode(QWEN3, "64 x 32..320", MIXED_CONTEXTS, 64),
    decode(QWEN3, "1 x 160", (160,), 2),
    Attention("prefill 8 x 128", SMOLLM2, ((128, 128),) * 8, 8, 1024),
    Attention("prefill 8 x 32..224", SMOLLM2, tuple((n, n) for n in PROMPTS), 8, 1024),
    Attention(
        "56 decodes + 7 prompts",
        SMOLLM2,
        tuple((n, 1) for n in MIXED_CONTEXTS[:56]) + tuple((n, n) for n in PROMPTS[1:]),
        64,
        1024 + 64,
    ),
    Attention("prefill 1024 onto 7168", SMOLLM2, ((8192, 1024),), 2, 1024),
    *shared_decode(SMOLLM2, 64, 512, 48),
    *shared_decode(SMOLLM2, 8, 256, 48),
    *shared_decode(QWEN3, 64, 512, 48),
)
OPTIONS = tuple(
    replace(case, label=f"{case.label}, {label}", **options)
    for case in (ATTENTION[0], ATTENTION[3], ATTENTION[8])
    for label, options in (
        ("fp8 as uint8", {"kv_dtype": "uint8"}),
        ("int8", {"kv_dtype": "int8"}),
        ("sinks", {"sinks": True}),
        ("lse", {"return_lse": True}),
    )
)
UPDATES = tuple(
    (tokens, pages, kv_dtype)
    for tokens in (64, 1024)
    for pages, kv_dtype in (
        (100, None),
        (10_000, None),
        (10_000, "float8_e4m3fn"),
        (10_000, "int8"),
    )
)


@dataclass
class Case:
    suite: str
    label: str
    layers: int
    bytes_per_layer: int
    run: Callable[[], None]
    best: float = float("inf")
    best_cpu: float = float("inf")


def attention_case(case: Attention, dtype: jnp.dtype, layers: int) -> Case:
    heads = case.heads
    needed = [-(-context // PAGE_SIZE) for context, _ in case.rows]
    num_pages = sum(needed) + 1
    free = np.random.default_rng(1).permutation(np.arange(1, num_pages))
    block_tables = np.zeros((case.num_rows, PAGES_PER_ROW), np.int32)
    for row, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
        block_tables[row, :count] = free[end - count : end]
    num_shared = case.shared // PAGE_SIZE
    block_tables[: len(needed), :num_shared] = block_tables[0, :num_shared]
    seq_lens = np.zeros(case.num_rows, np.int32)
    seq_lens[: len(case.rows)] = [context for context, _ in case.rows]
    lens = [query_len for _, query_len in case.rows] + [0] * (case.num_rows - len(case.rows))
    query_start_loc = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    key = jax.random.key(0)
    shape = (num_pages, heads.kv, PAGE_SIZE, heads.size)
    kv_dtype = jnp.dtype(case.kv_dtype or dtype)
    scales = jnp.full(heads.kv, 1 / 30, jnp.float32)

    def random_pages(index: int) -> jax.Array:
        pages = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
        return pages if case.kv_dtype is None else quantize(pages, scales[0], kv_dtype)

    caches = [(random_pages(2 * i), random_pages(2 * i + 1)) for i in range(layers)]
    options = {
        "sinks": jnp.zeros(heads.kv * heads.group) if case.sinks else None,
        "kv_scales": None if case.kv_dtype is None else (scales, scales),
    }
    q_tnh = jax.random.normal(key, (case.num_tokens, heads.kv * heads.group, heads.size), dtype)

    prefixes = SharedPrefixes(
        jnp.asarray(block_tables[:1]),
        jnp.array([case.shared], jnp.int32),
        jnp.array([0, len(case.rows)], jnp.int32),
    )

    @jax.jit
    def layer(q_tnh, cache, options, *batch):
        options = {"scale": heads.size**-0.5, "decode_only": case.decode_only, **options}
        if case.together:
            return shared_prefix_attention(q_tnh, cache, *batch, prefixes, **options), 0.0
        result = ragged_paged_attention(q_tnh, cache, *batch, return_lse=case.return_lse, **options)
        return result if case.return_lse else (result, 0.0)

    @jax.jit
    def step(q_tnh, caches, options, *batch):
        lse = 0.0
        for cache in caches:
            out, layer_lse = layer(q_tnh, cache, options, *batch)
            q_tnh, lse = q_tnh + out, lse + layer_lse
        return q_tnh, lse

    batch = tuple(jnp.asarray(x) for x in (block_tables, seq_lens, query_start_loc))
    compiled = step.lower(q_tnh, caches, options, *batch).compile()
    slot_bytes = 2 * heads.kv * heads.size * kv_dtype.itemsize
    return Case(
        case.suite,
        f"{heads.name}: {case.label}",
        layers,
        (case.shared + sum(context - case.shared for context, _ in case.rows)) * slot_bytes,
        lambda: jax.block_until_ready(compiled(q_tnh, caches, options, *batch)),
    )


def update_case(
    num_tokens: int, num_pages: int, kv_dtype: str | None, dtype: jnp.dtype, layers: int
) -> Case:
    heads = SMOLLM2
    shape = (num_pages, heads.kv, PAGE_SIZE, heads.size)
    stored = jnp.dtype(kv_dtype or dtype)
    caches = [(jnp.zeros(shape, stored), jnp.zeros(shape, stored)) for _ in range(layers)]
    scales = None if kv_dtype is None else (jnp.ones(heads.kv),) * 2
    new = jnp.ones((num_tokens, heads.kv, heads.size), dtype)
    slots = np.random.default_rng(2).permutation(num_pages * PAGE_SIZE)[:num_tokens]
    slot_mapping = jnp.asarray(slots, jnp.int32)

    def step(caches, new, slot_mapping):
        return [
            kv_cache_update(cache, new, new, slot_mapping, kv_scales=scales) for cache in caches
        ]

    compiled = jax.jit(step, donate_argnums=0).lower(caches, new, slot_mapping).compile()

    def run() -> None:
        nonlocal caches
        caches = jax.block_until_ready(compiled(caches, new, slot_mapping))

    return Case(
        "update",
        f"{heads.name}: {num_tokens} tokens into {num_pages} pages, {stored.name}",
        layers,
        2 * new.size * stored.itemsize,
        run,
    )


def read_bandwidth() -> float:
    """Bytes per second of one pass over 256 MiB."""
    data = jnp.ones(1 << 26, jnp.float32)
    total = jax.jit(lambda x: x.reshape(1 << 10, -1).max(axis=0))
    total(data).block_until_ready()
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        total(data).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return data.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each case")
    parser.add_argument("--only", choices=("decode", "shared", "prefill", "update"))
    parser.add_argument("--grep", default="", help="cases whose label contains this")
    args = parser.parse_args()
    dtype = jnp.dtype(args.dtype)

    def wanted(suite: str, label: str) -> bool:
        return args.only in (None, suite) and args.grep in label

    cases = [
        attention_case(case, dtype, args.layers)
        for case in ATTENTION + OPTIONS
        if wanted(case.suite, case.label)
    ]
    cases += [
        update_case(*update, dtype, args.layers)
        for update in UPDATES
        if wanted("update", "update {} tokens into {} pages, {}".format(*update))
    ]
    bandwidth = read_bandwidth()
    for case in cases:
        case.run()
    stop = time.perf_counter() + args.seconds * len(cases)
    while True:
        for case in cases:
            cpu, begin = time.process_time(), time.perf_counter()
            case.run()
            case.best = min(case.best, time.perf_counter() - begin)
            case.best_cpu = min(case.best_cpu, time.process_time() - cpu)
        if time.perf_counter() > stop:
            break
    print(f"{jax.devices()[0].device_kind}, {dtype.name}, read {bandwidth / 1e9:.1f} GB/s")
    print(f"{'case':58s} {'ms/layer':>9s} {'cpu ms':>8s} {'floor ms':>9s} {'ratio':>7s}")
    for case in cases:
        floor = case.bytes_per_layer / bandwidth * 1e3
        wall, cpu = (x / case.layers * 1e3 for x in (case.best, case.best_cpu))
        print(f"{case.label:58s} {wall:9.3f} {cpu:8.3f} {floor:9.4f} {wall / floor:7.1f}")


if __name__ == "__main__":
    main()
