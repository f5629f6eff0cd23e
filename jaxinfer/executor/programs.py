"""The programs of a step, compiled.

`forward` (one per step shape) turns a ragged batch into hidden states; `sample` (one per number of rows and sampler
variant) turns the rows' last hidden states into tokens; `verify` is its like for steps with drafts (one per number of
positions to sample at); `score_prompt` (one per number of tokens) is there for prompt logprobs. Forward and sampling are
apart so that a mask which depends on the previous step's tokens can be built while the forward pass runs, and so that
sampler variants don't multiply the large programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jaxinfer.config import LogprobsMode
from jaxinfer.executor.buckets import BucketLadder, StepShape
from jaxinfer.executor.compiler_options import forward_options
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.kv_cache import CacheShapes
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.sampler_features import (
    SamplerFeatures,
    all_features,
    logprob_ids_width,
    logprobs_rungs,
)
from jaxinfer.executor.sampler_state import SamplerState
from jaxinfer.executor.sampling_rows import NUM_COLUMNS
from jaxinfer.executor.speculative.step_functions import take_positions, verify_step
from jaxinfer.executor.speculative.verification import DraftedPositions
from jaxinfer.executor.step_functions import forward_step, sample_step, score_prompt
from jaxinfer.models.decoder import Head
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.lora import AdapterStacks
from jaxinfer.parallel.mesh import replicated


@dataclass(frozen=True)
class Programs:
    """Compiles the programs of one engine, each when first asked for (or all by `warm_up`)."""

    decoder: FunctionalDecoder
    ladder: BucketLadder
    cache: ProgramCache
    sampler_state: SamplerState
    num_rows: int
    num_blocks: int
    block_size: int
    max_logprobs: int
    logprobs_mode: LogprobsMode = "raw_logprobs"
    processors: LogitsProcessors | None = None
    num_drafts: int = 0
    """The most that a row can have; 0 without speculation."""
    draws_drafts: bool = False
    """Whether drafts come with the probabilities that they were drawn with."""
    stream_layers: tuple[int, ...] = ()
    """What a drafter wants to see of the model: see `forward_step`."""
    adapters: AdapterStacks | None = None
    """Shapes, in an engine with adapters."""

    @property
    def num_slots(self) -> int:
        """Of states: one per row, and padding's."""
        return self.num_rows + 1

    def kv_cache_shapes(self) -> CacheShapes:
        return self.decoder.kv_cache_shapes(self.num_blocks, self.block_size, self.num_slots)

    @property
    def draft_probs_nbytes(self) -> int:
        """What the probabilities of a step's drafts take at most."""
        num_rows = self.num_rows if self.draws_drafts else 0
        return num_rows * self.num_drafts * self.decoder.spec.vocab_size * 4

    def forward(self, shape: StepShape) -> jax.stages.Compiled:
        return self.cache.get(("forward", shape), self._compile(self.lower_forward, shape))

    def sample(self, num_rows: int, features: SamplerFeatures) -> jax.stages.Compiled:
        key = ("sample", num_rows, features)
        return self.cache.get(key, self._compile(self.lower_sample, num_rows, features))

    def verify(self, num_positions: int, features: SamplerFeatures) -> jax.stages.Compiled:
        key = ("verify", num_positions, features)
        return self.cache.get(key, self._compile(self.lower_verify, num_positions, features))

    def take_positions(self, num_tokens: int, num_positions: int) -> jax.stages.Compiled:
        key = ("take_positions", num_tokens, num_positions)
        return self.cache.get(key, self._compile(self.lower_take, num_tokens, num_positions))

    def score_prompt(self, num_tokens: int, num_logprobs: int) -> jax.stages.Compiled:
        key = ("score_prompt", num_tokens, num_logprobs)
        return self.cache.get(key, self._compile(self.lower_score_prompt, num_tokens, num_logprobs))

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything that any step can ask for."""
        self.cache.compile_all(self._all_jobs(), progress)

    def lower_forward(self, shape: StepShape) -> jax.stages.Lowered:
        return jax.jit(
            partial(forward_step, self.decoder, shape, stream_layers=self.stream_layers),
            donate_argnums=1,
            compiler_options=forward_options(self.decoder.mesh),
        ).lower(
            list(self.decoder.leaves.values()),
            self.kv_cache_shapes(),
            self._array((self.num_rows + 1,), np.int32),
            self._array((self._packed_size(shape),), np.int32),
            self.adapters,
        )

    def _packed_size(self, shape: StepShape) -> int:
        return PackedLayout(shape, len(self.decoder.groups), self.adapters is not None).size

    def lower_sample(self, num_rows: int, features: SamplerFeatures) -> jax.stages.Lowered:
        step = partial(sample_step, self.decoder, features, self.logprobs_mode, self.processors)
        return jax.jit(step, donate_argnums=(2, 3) if features.stateful else 2).lower(
            *self._sampling(num_rows, features)
        )

    def lower_verify(self, num_positions: int, features: SamplerFeatures) -> jax.stages.Lowered:
        step = partial(
            verify_step,
            self.decoder,
            features,
            self.logprobs_mode,
            self.processors,
            self.num_drafts,
        )
        ids, probs = self._array((num_positions,), np.int32), None
        if self.draws_drafts:
            probs = self._array((num_positions, self.decoder.spec.vocab_size), np.float32)
        return jax.jit(step, donate_argnums=(2, 3) if features.stateful else 2).lower(
            *self._sampling(num_positions, features), DraftedPositions(ids, ids, probs)
        )

    def _sampling(self, num_rows: int, features: SamplerFeatures) -> tuple:
        """What a sampling program takes."""
        spec, processors = self.decoder.spec, self.processors
        words = self._array((num_rows, -(-spec.vocab_size // 32)), np.uint32)
        num_columns = NUM_COLUMNS if processors is None else processors.num_columns
        logprob_ids = None
        if features.num_logprobs is not None:
            width = logprob_ids_width(features.num_logprobs)
            logprob_ids = self._array((num_rows, width), np.int32)
        return (
            self._head,
            self._array((num_rows, spec.embed_dim), self.decoder.dtype),
            self._array((self.num_rows + 1,), np.int32),
            self.sampler_state.abstract() if features.stateful else None,
            self._array((num_rows, num_columns), np.int32),
            words if features.masked else None,
            logprob_ids,
        )

    def lower_take(self, num_tokens: int, num_positions: int) -> jax.stages.Lowered:
        hidden = self._array((num_tokens, self.decoder.spec.embed_dim), self.decoder.dtype)
        return jax.jit(take_positions).lower(hidden, self._array((num_positions,), np.int32))

    def lower_score_prompt(self, num_tokens: int, num_logprobs: int) -> jax.stages.Lowered:
        return jax.jit(partial(score_prompt, self.decoder, num_logprobs)).lower(
            self._head,
            self._array((num_tokens, self.decoder.spec.embed_dim), self.decoder.dtype),
            self._array((num_tokens,), np.int32),
        )

    @property
    def _head(self) -> Head:
        return self.decoder.head(list(self.decoder.leaves.values()))

    def _array(self, shape: tuple[int, ...], dtype: np.dtype | type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.decoder.mesh))

    @staticmethod
    def _compile(lower: Callable[..., jax.stages.Lowered], *args) -> Callable:
        return lambda: lower(*args).compile()

    def _all_jobs(self) -> Iterator[tuple[tuple, Callable]]:
        shapes = list(self.ladder.all_shapes())
        for shape in shapes:
            yield ("forward", shape), self._compile(self.lower_forward, shape)
        vocab_size = self.decoder.spec.vocab_size
        for num_rows in sorted({shape.num_rows for shape in shapes}):
            for features in all_features(
                self.max_logprobs, vocab_size, processors=self.processors is not None
            ):
                job = self._compile(self.lower_sample, num_rows, features)
                yield ("sample", num_rows, features), job
        positions = self.ladder.all_positions()
        for num_positions in positions:
            for features in all_features(
                self.max_logprobs, vocab_size, processors=self.processors is not None
            ):
                job = self._compile(self.lower_verify, num_positions, features)
                yield ("verify", num_positions, features), job
        for num_tokens in self.ladder.mixed_tokens:
            for num_positions in positions:
                if num_positions <= num_tokens:
                    job = self._compile(self.lower_take, num_tokens, num_positions)
                    yield ("take_positions", num_tokens, num_positions), job
        for num_tokens in sorted({shape.num_tokens for shape in shapes}):
            for num_logprobs in logprobs_rungs(self.max_logprobs, vocab_size):
                job = self._compile(self.lower_score_prompt, num_tokens, num_logprobs)
                yield ("score_prompt", num_tokens, num_logprobs), job
