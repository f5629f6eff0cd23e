"""Every attention kernel's results against float64, on the device that it was written for.

What nobody may read is NaN: slots past a context, pages of no request, tokens of no request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import calls, latent, numerics_ops, oracle, shared_prefix
from benchmarks.gpu.batches import Batch, Heads, host_random, make_batch, random_array
from benchmarks.gpu.cases import Case, Context

SMALL = Heads(2, 4, 128)
TOLERANCE = 2e-2
"""Of one token's and head's result as a vector: bfloat16 arithmetic lands near 5e-3."""
LSE_TOLERANCE = 2e-2

DECODES = ((1, 1), (63, 1), (64, 1), (0, 0), (700, 1), (2049, 1), (3000, 1))
MIXED = ((900, 1), (3, 1), (1500, 600), (0, 0), (37, 37), (700, 5), (2000, 130))
TINY_DECODES = ((70, 1), (0, 0), (3, 1))
TINY_MIXED = ((40, 1), (60, 20), (0, 0), (7, 7))


@dataclass(frozen=True)
class Attention:
    """One call. `rows` are (context, query tokens); without `sample` every token and kv head is checked."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: Heads = SMALL
    page_size: int = 64
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    padding: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sample: int | None = None
    """Tokens to check, and one kv head of all."""
    interpreted: bool = False

    @property
    def decode_only(self) -> bool:
        return all(tokens <= 1 for _, tokens in self.rows) and not self.padding


def cases(context: Context) -> list[Case]:
    chosen = dry_cases() if context.dry else gpu_cases()
    return [
        *(Check(case).case() for case in chosen),
        *numerics_ops.cases(context),
        *shared_prefix.numeric_cases(context),
        *latent.numeric_cases(context),
    ]


def gpu_cases() -> list[Attention]:
    decode = Attention("decode", DECODES)
    mixed = Attention("mixed", MIXED, padding=3)

    def vary(base: Attention, name: str, **changes: Any) -> Attention:
        return dataclasses.replace(base, name=f"{base.name} {name}", **changes)

    every_head_size = [
        vary(mixed, f"head size {size}", heads=Heads(2, 4, size), page_size=page_size)
        for size, page_size in ((64, 16), (80, 32), (96, 64), (256, 64))
    ]
    return [
        decode,
        mixed,
        vary(decode, "64 x 4k", rows=((4096, 1),) * 64, heads=Heads(8, 4, 128), sample=16),
        vary(decode, "16 x 8k", rows=((8192, 1),) * 16, heads=Heads(8, 8, 128), sample=16),
        vary(decode, "1 x 128k", rows=((131_072, 1),), heads=Heads(8, 4, 128), sample=1),
        vary(mixed, "1 x 8k prompt", rows=((8192, 8192),), heads=Heads(8, 4, 128), sample=48),
        vary(mixed, "2k onto 30k", rows=((32_768, 2048),), heads=Heads(8, 4, 128), sample=24),
        vary(mixed, "speculation", rows=((500, 4), (2000, 8), (9, 2), (1000, 1)), padding=2),
        *every_head_size,
        vary(mixed, "pages of 128", page_size=128),
        vary(mixed, "pages of 16", page_size=16),
        vary(mixed, "float16", dtype="float16"),
        vary(mixed, "one query head", heads=Heads(4, 1, 128)),
        vary(mixed, "window", options={"sliding_window": 200}),
        vary(mixed, "soft cap", options={"soft_cap": 2.0}),
        vary(mixed, "window and soft cap", options={"sliding_window": 700, "soft_cap": 2.0}),
        vary(mixed, "sinks", options={"sinks": True}),
        vary(mixed, "lse", options={"return_lse": True}),
        vary(mixed, "sinks, window and lse",
             options={"sinks": True, "return_lse": True, "sliding_window": 300}),
        vary(mixed, "not causal, lse", options={"causal": False, "return_lse": True}),
        vary(decode, "fp8 cache", cache_dtype="float8_e4m3fn"),
        vary(decode, "int8 cache", cache_dtype="int8"),
        vary(mixed, "fp8 cache", cache_dtype="float8_e4m3fn"),
        vary(mixed, "int8 cache", cache_dtype="int8"),
        vary(mixed, "fp8 cache, lse", cache_dtype="float8_e4m3fn", options={"return_lse": True}),
    ]  # fmt: skip


def dry_cases() -> list[Attention]:
    small = {"heads": Heads(1, 2, 64), "page_size": 16}
    mixed = Attention("mixed", TINY_MIXED, padding=2, **small)
    return [
        Attention("decode", TINY_DECODES, **small),
        Attention("mixed, interpreted", TINY_MIXED, padding=2, interpreted=True, **small),
        dataclasses.replace(mixed, name="mixed, sampled", sample=4),
        dataclasses.replace(
            mixed, name="mixed options", options={"sliding_window": 9, "soft_cap": 2.0}
        ),
        dataclasses.replace(
            mixed, name="mixed sinks and lse", options={"sinks": True, "return_lse": True}
        ),
        dataclasses.replace(
            mixed, name="mixed not causal", options={"causal": False, "return_lse": True}
        ),
        dataclasses.replace(mixed, name="mixed fp8 cache", cache_dtype="float8_e4m3fn"),
        dataclasses.replace(mixed, name="mixed int8 cache", cache_dtype="int8"),
    ]


class Check:
    """Compiles a call, runs it on poisoned memory and compares."""

    def __init__(self, case: Attention) -> None:
        self.spec = case
        self.scale = case.heads.size**-0.5

    def case(self) -> Case:
        compile_ = None if self.spec.interpreted else lambda: self.program
        return Case(self.spec.name, self.run, compile_, limit=45)

    @functools.cached_property
    def batch(self) -> Batch:
        spec = self.spec
        needed = sum(-(-context // spec.page_size) for context, _ in spec.rows)
        longest = max(-(-context // spec.page_size) for context, _ in spec.rows)
        tokens = sum(n for _, n in spec.rows) + spec.padding
        return make_batch(
            spec.rows,
            num_pages=needed + 3,
            page_size=spec.page_size,
            pages_per_row=longest + 1,
            num_tokens=len(spec.rows) if self.decode_only else tokens,
        )

    @property
    def decode_only(self) -> bool:
        return self.spec.decode_only

    @functools.cached_property
    def extra(self) -> dict[str, Any]:
        """Options that are arrays."""
        heads, options = self.spec.heads, {}
        if self.spec.options.get("sinks"):
            options["sinks"] = random_array((heads.queries,), "float32", seed=3)
        if self.spec.cache_dtype is not None:
            scale = 0.02 if self.spec.cache_dtype == "int8" else 0.01
            spread = np.linspace(1, 2, heads.kv, dtype=np.float32)
            options["kv_scales"] = (jnp.asarray(scale * spread), jnp.asarray(1.5 * scale * spread))
        return options

    @functools.cached_property
    def call(self) -> Callable[..., Any]:
        plain = {k: v for k, v in self.spec.options.items() if k != "sinks"}
        options = {"scale": self.scale, "decode_only": self.decode_only, **plain}
        if self.spec.interpreted:
            heads = self.spec.heads
            return calls.interpreted_attention(heads.size, heads.group, **options)
        return calls.attention(**options)

    @functools.cached_property
    def program(self) -> Callable[..., Any]:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*self.shapes, *self.batch.arrays)
        )
        attend = jax.jit(lambda *arrays, **extra: self.call(*arrays, **extra))
        return attend.lower(*shapes, **self.extra).compile()

    @property
    def shapes(self) -> tuple[Any, Any]:
        """Of queries and pages."""
        spec, heads = self.spec, self.spec.heads
        q = jax.ShapeDtypeStruct((self.batch.num_tokens, heads.queries, heads.size), spec.dtype)
        num_pages = sum(-(-context // spec.page_size) for context, _ in spec.rows) + 3
        shape = (num_pages, heads.kv, spec.page_size, heads.size)
        pages = jax.ShapeDtypeStruct(shape, spec.cache_dtype or spec.dtype)
        return q, (pages, pages)

    def arrays(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """On the host: nothing has to be compiled for them, and the oracle reads them too."""
        spec, (q, (pages, _)) = self.spec, self.shapes
        unused = np.ones((pages.shape[0], spec.page_size), bool)
        for row, (context, _) in enumerate(spec.rows):
            for index in range(-(-context // spec.page_size)):
                page = self.batch.block_tables[row, index]
                unused[page, : context - index * spec.page_size] = False

        def poisoned(seed: int, scales: jax.Array | None) -> np.ndarray:
            if scales is None:
                values = host_random(pages.shape, pages.dtype, 1.0, seed)
            else:
                values = host_random(pages.shape, np.float32, 1.0, seed)
                values /= np.asarray(scales)[:, None, None]
                if pages.dtype == jnp.int8:
                    values = values.round().clip(-127, 127)
                values = values.astype(pages.dtype)
            page, offset = np.nonzero(unused)
            values[page, :, offset] = -128 if pages.dtype == jnp.int8 else np.nan
            return values

        scales = self.extra.get("kv_scales", (None, None))
        kv_pages = poisoned(1, scales[0]), poisoned(2, scales[1])
        return host_random(q.shape, q.dtype, 1.0, 5), kv_pages

    def run(self) -> dict[str, Any]:
        q_tnh, kv_pages = self.arrays()
        run = self.call if self.spec.interpreted else self.program
        on_device = jax.tree.map(jnp.asarray, (q_tnh, kv_pages))
        out = run(*on_device, *self.batch.arrays, **self.extra)
        out, lse = out if self.spec.options.get("return_lse") else (out, None)
        return self.compare(q_tnh, kv_pages, np.asarray(out), lse)

    def compare(self, q_tnh: Any, kv_pages: Any, out: np.ndarray, lse: Any) -> dict[str, Any]:
        spec, heads, batch = self.spec, self.spec.heads, self.batch
        starts = np.arange(len(spec.rows) + 1) if self.decode_only else batch.query_start_loc
        owned = np.repeat(batch.seq_lens > 0, np.diff(starts))
        tokens, kv_heads = np.flatnonzero(owned), np.arange(heads.kv)
        if spec.sample is not None:
            picked = np.linspace(0, len(tokens) - 1, spec.sample).round().astype(int)
            tokens, kv_heads = tokens[picked], np.array([heads.kv - 1])
        names = ("sliding_window", "soft_cap", "causal")
        options = oracle.Options(
            self.scale,
            **{name: spec.options[name] for name in names if name in spec.options},
            **{name: jax.tree.map(np.asarray, value) for name, value in self.extra.items()},
        )
        expected, expected_lse = oracle.attention(
            q_tnh, kv_pages, batch.block_tables, batch.seq_lens, starts, options,
            tokens=tokens, kv_heads=kv_heads,
        )  # fmt: skip
        shape = (batch.num_tokens, heads.kv, heads.group)
        actual = out.reshape(*shape, heads.size)
        error = oracle.relative_error(actual[np.ix_(tokens, kv_heads)], expected)
        values: dict[str, Any] = {"tolerance": TOLERANCE}
        unowned = np.ones(batch.num_tokens, bool)
        unowned[np.flatnonzero(owned)] = False
        if np.any(oracle.float64(out[unowned]) != 0):
            values["note"] = "tokens of no request are not zero"
            error = float("inf")
        if lse is not None:
            lse = np.asarray(lse).reshape(shape)
            values["lse_error"] = oracle.largest_difference(
                lse[np.ix_(tokens, kv_heads)], expected_lse
            )
            if not np.isneginf(lse[unowned]).all():
                values["note"] = "lse of tokens of no request is not -inf"
                error = float("inf")
            if not values["lse_error"] <= LSE_TOLERANCE:
                error = max(error, values["lse_error"])
        return {"error": error, **values}
