"""The programs of a deterministic engine: one of each kind, so that every token goes through the same machine code.

`forward` has one shape, and so has everything in it: matmuls of so many rows, norms, attention (which adds up in an order
that depends on a token's own context alone). What is left is which row of the arrays a token is, and a row's result
doesn't depend on that. The logits have a program of their own, or each variant of the sampler would compute them in its
own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jaxinfer.executor.buckets import StepShape
from jaxinfer.executor.compiler_options import deterministic_options, forward_options
from jaxinfer.executor.logprobs import token_logprobs
from jaxinfer.executor.programs import Programs
from jaxinfer.executor.sampler_features import SamplerFeatures, logprob_ids_width
from jaxinfer.executor.sampling_rows import NUM_COLUMNS
from jaxinfer.executor.step_functions import forward_step, sample_logits

TILE_TOKENS = {"cpu": 16, "gpu": 128}
"""Tokens per program, by device: a GPU takes as long for a matmul of fewer rows, a CPU nearly so."""


@dataclass(frozen=True)
class DeterministicPrograms(Programs):
    """`sample` and `score_prompt` take logits where those of an ordinary engine take the head and hidden states."""

    @property
    def tile(self) -> int:
        """Tokens, and rows, of every program."""
        return self.ladder.mixed_tokens[0]

    def logits(self) -> jax.stages.Compiled:
        """(head, hidden [tile, E]) -> [tile, V] float32."""
        return self.cache.get(("logits",), self._compile(self.lower_logits))

    def lower_forward(self, shape: StepShape) -> jax.stages.Lowered:
        mesh = self.decoder.mesh
        return jax.jit(
            partial(forward_step, self.decoder, shape, batch_invariant=True),
            donate_argnums=1,
            compiler_options={**(forward_options(mesh) or {}), **deterministic_options(mesh)},
        ).lower(
            list(self.decoder.leaves.values()),
            self.decoder.kv_cache_shapes(self.num_blocks, self.block_size),
            self._array((self.num_rows + 1,), np.int32),
            self._array((self._packed_size(shape),), np.int32),
            self.adapters,
        )

    def lower_logits(self) -> jax.stages.Lowered:
        return self._jit(self.decoder.logits).lower(
            self._head, self._array((self.tile, self.decoder.spec.embed_dim), self.decoder.dtype)
        )

    def lower_sample(self, num_rows: int, features: SamplerFeatures) -> jax.stages.Lowered:
        vocab_size = self.decoder.spec.vocab_size
        words = self._array((num_rows, -(-vocab_size // 32)), np.uint32)
        state = self.sampler_state.abstract() if features.stateful else None
        num_columns = NUM_COLUMNS if self.processors is None else self.processors.num_columns
        logprob_ids = None
        if features.num_logprobs is not None:
            width = logprob_ids_width(features.num_logprobs)
            logprob_ids = self._array((num_rows, width), np.int32)
        return self._jit(
            partial(sample_logits, features, self.logprobs_mode, self.processors),
            donate_argnums=(1, 2) if state else 1,
        ).lower(
            self._array((num_rows, vocab_size), np.float32),
            self._array((self.num_rows + 1,), np.int32),
            state,
            self._array((num_rows, num_columns), np.int32),
            words if features.masked else None,
            logprob_ids,
        )

    def lower_score_prompt(self, num_tokens: int, num_logprobs: int) -> jax.stages.Lowered:
        return self._jit(partial(token_logprobs, num_logprobs=num_logprobs)).lower(
            self._array((num_tokens, self.decoder.spec.vocab_size), np.float32),
            self._array((num_tokens,), np.int32),
        )

    def _jit(self, function: Callable, **options: object) -> jax.stages.Wrapped:
        return jax.jit(
            function, compiler_options=deterministic_options(self.decoder.mesh), **options
        )

    def _all_jobs(self) -> Iterator[tuple[tuple, Callable]]:
        yield ("logits",), self._compile(self.lower_logits)
        yield from super()._all_jobs()
