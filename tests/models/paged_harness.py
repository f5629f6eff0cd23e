"""Drives a decoder the way the engine does: chunked prefill within a token budget, then decode, over random pages of
a cache that starts out as NaN."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription, describe_model
from jaxinfer.models.stored_layouts import stored_layouts
from jaxinfer.models.stored_weight import pack_part
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.loader import StoredLeaves, load_leaves
from jaxinfer.weights.reader import CheckpointReader
from jaxinfer.weights.resolve import ModelFiles, open_checkpoint


def load_checkpoint(
    directory: Path,
    tensor_parallel_size: int = 1,
    max_model_len: int = 64,
    *,
    dequantize: bool = False,
    **options: Any,
) -> tuple[ModelDescription, FunctionalDecoder, list[jax.Array]]:
    """Read a safetensors directory by its plan, checking that every tensor is used or known to be ignored. What it has
    quantized stays so unless told to `dequantize`. `options`: of `FunctionalDecoder.create`."""
    description = describe_model(json.loads((directory / "config.json").read_text()), max_model_len)
    model = FunctionalDecoder.create(
        description.spec, make_mesh(tensor_parallel_size), description.checkpoint_dtype, **options
    )
    reader = open_checkpoint(ModelFiles("hf", directory))
    return description, *load_model(reader, description, model, dequantize=dequantize)


def load_model(
    reader: CheckpointReader,
    description: ModelDescription,
    model: FunctionalDecoder,
    *,
    dequantize: bool = False,
) -> tuple[FunctionalDecoder, list[jax.Array]]:
    plan = description.checkpoint_plan(model.dims, reader.names())
    if not dequantize:
        model = model.with_layouts(stored_layouts(reader, plan, model))
    leaves = load_leaves(
        reader,
        plan,
        model.leaves,
        ignored=description.ignored_tensors,
        stored=StoredLeaves(model.layouts, np.dtype(model.dtype), pack_part),
    )
    return model, [leaves[path] for path in model.leaves]


@dataclass
class _Request:
    tokens: list[int]
    target_length: int
    pages: list[int]
    state_slot: int
    computed: int = 0
    logits: list[np.ndarray] = field(default_factory=list)


@dataclass
class PagedRunner:
    """Runs requests together; all steps have one of two shapes, T tokens mixed or one token a row."""

    model: FunctionalDecoder
    leaves: list[jax.Array]
    page_size: int = 4
    budget: int = 8
    num_rows: int = 4
    max_length: int = 64
    compiler_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        options = self.compiler_options
        self._forward = jax.jit(self.model.forward, donate_argnums=2, compiler_options=options)
        self._logits = jax.jit(self.model.logits, compiler_options=options)

    def greedy(
        self, prompts: Sequence[Sequence[int]], num_new_tokens: int
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Each request's tokens, prompt included, and its logits [len(tokens) - 1, V] float32."""
        pages_per_row = -(-self.max_length // self.page_size)
        order = np.random.default_rng(0).permutation(len(prompts) * pages_per_row) + 1
        requests = [
            _Request(list(p), len(p) + num_new_tokens, order[i :: len(prompts)].tolist(), i)
            for i, p in enumerate(prompts)
        ]
        kv_cache = jax.tree.map(
            lambda s: jax.device_put(jnp.full(s.shape, jnp.nan, s.dtype), s.sharding),
            self.model.kv_cache_shapes(len(order) + 1, self.page_size, self.num_rows + 1),
        )
        while running := [r for r in requests if len(r.tokens) < r.target_length]:
            chunks = self._schedule(running)
            batch = self._batch(chunks, pages_per_row)
            hidden, kv_cache = self._forward(self.leaves, batch, kv_cache)
            logits = np.asarray(self._logits(self.model.head(self.leaves), hidden))
            assert np.isfinite(logits).all()
            start = 0
            for request, count in chunks:
                request.logits.extend(logits[start : start + count])
                start += count
                request.computed += count
                if request.computed == len(request.tokens):
                    request.tokens.append(int(request.logits[-1].argmax()))
        return [r.tokens for r in requests], [np.stack(r.logits) for r in requests]

    def _schedule(self, running: list[_Request]) -> list[tuple[_Request, int]]:
        left, chunks = self.budget, []
        for request in running:
            count = min(left, len(request.tokens) - request.computed)
            left -= count
            if count:
                chunks.append((request, count))
        return sorted(chunks, key=lambda chunk: chunk[1] != 1)

    def _batch(self, chunks: list[tuple[_Request, int]], pages_per_row: int) -> RaggedBatch:
        decode_only = all(count == 1 for _, count in chunks)
        T, R, S = self.num_rows if decode_only else self.budget, self.num_rows, self.page_size
        token_ids, positions, slots = (np.zeros(T, np.int32) for _ in range(3))
        starts, seq_lens = np.zeros(R + 1, np.int32), np.zeros(R, np.int32)
        tables = np.zeros((R, pages_per_row), np.int32)
        state_slots = np.full(R, R, np.int32)
        used = 0
        for row, (request, count) in enumerate(chunks):
            where = np.arange(request.computed, request.computed + count)
            span = slice(used, used + count)
            token_ids[span] = request.tokens[where[0] : where[-1] + 1]
            positions[span] = where
            slots[span] = np.asarray(request.pages)[where // S] * S + where % S
            used += count
            starts[row + 1 :] = used
            seq_lens[row] = where[-1] + 1
            state_slots[row] = request.state_slot
            num_pages = -(-seq_lens[row] // S)
            tables[row, :num_pages] = request.pages[:num_pages]
        arrays = (token_ids, positions, slots, starts, seq_lens, tables)
        return RaggedBatch(
            *map(jnp.asarray, arrays),
            decode_only=decode_only,
            state_slots=jnp.asarray(state_slots) if self.model.spec.has_states else None,
        )
