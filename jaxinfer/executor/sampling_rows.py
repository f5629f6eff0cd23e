"""The sampling parameters of the running requests on the host: one numpy matrix, a line per row.

A step uploads its rows' lines as a single int32 array (floats by their bits), so that the host's work per step is one
fancy index whatever the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.config import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS
from jaxinfer.engine.plan import TokenMask
from jaxinfer.executor.sampler_features import (
    SamplerFeatures,
    SamplerLevel,
    logprob_ids_width,
    logprobs_rungs,
)
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.executor.logits_processors import LogitsProcessors

# Columns of the packed array; the floats from TEMPERATURE on, TOP_K apart, are stored by their bits.
ROW, POSITION, ACTIVE, SEED_HIGH, SEED_LOW, TOP_K = range(6)
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6, 12)
NUM_COLUMNS = 12

PROMPT_BIT = np.uint16(1 << 15)
MAX_COUNT = np.uint16((1 << 15) - 1)
"""A token's state is a uint16: the top bit where the prompt holds it, below it how often the output does. Counts
saturate, far beyond where a penalty of 0.001 has decided the matter."""

_NO_LOGPROBS = -1


class SamplingRows:
    """Sampling parameters by row, for `max_num_seqs` rows.

    `num_logprobs[row]` and `num_prompt_logprobs[row]` are what the row's request asked for, -1 where it did not.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        *,
        seed: int | Sequence[int] = 0,
        max_logprobs: int = 20,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self._logprobs_rungs = np.array(logprobs_rungs(max_logprobs, vocab_size))
        width = min(int(self._logprobs_rungs[-1]), MAX_LOGPROB_TOKEN_IDS)
        self._logprob_ids = np.full((max_num_seqs + 1, width), -1, np.int32)
        self._levels = np.zeros(max_num_seqs, np.uint8)
        self._has_bias = np.zeros(max_num_seqs, bool)
        self._processed = np.zeros(max_num_seqs, bool)
        # The last line is what padding rows get: neutral, and out of the state's range.
        self._processors = processors
        num_columns = NUM_COLUMNS if processors is None else processors.num_columns
        self._packed = np.zeros((max_num_seqs + 1, num_columns), np.int32)
        self._floats = self._packed.view(np.float32)
        self._packed[:, ROW] = np.arange(max_num_seqs + 1)
        self._floats[:, TOP_P] = 1.0
        self._floats[:, REPETITION] = 1.0
        self._seeds = np.random.default_rng(seed)
        self._token_states: dict[int, np.ndarray] = {}
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def set_row(
        self, row: int, params: SamplingParams, token_ids: np.ndarray, num_prompt_tokens: int
    ) -> None:
        """Take in an admitted request; `token_ids` are all its known tokens, the prompt's first."""
        if params.seed is None:
            seed = int(self._seeds.integers(1 << 64, dtype=np.uint64))
        else:
            seed = params.seed & ((1 << 64) - 1)
        bits = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
        line, floats = self._packed[row], self._floats[row]
        line[SEED_HIGH], line[SEED_LOW] = bits
        line[TOP_K] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        floats[TEMPERATURE] = 0.0 if params.greedy else params.temperature
        floats[TOP_P] = params.top_p
        floats[MIN_P] = params.min_p
        floats[REPETITION] = params.repetition_penalty
        floats[FREQUENCY] = params.frequency_penalty
        floats[PRESENCE] = params.presence_penalty

        penalized = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        processed = bool(params.logits_processors)
        self._processed[row] = processed
        if self._processors is not None:
            self._processors.set_row(line, num_prompt_tokens, params.logits_processors)
        if penalized or processed:
            self._token_states[row] = token_states(token_ids, num_prompt_tokens, self.vocab_size)
        else:
            self._token_states.pop(row, None)
        self._set_bias(row, params.logit_bias or {})
        if penalized or processed or params.logit_bias:
            self._levels[row] = SamplerLevel.FULL
        else:
            self._levels[row] = SamplerLevel.GREEDY if params.greedy else SamplerLevel.RANDOM
        self.num_logprobs[row] = self._asked(params.logprobs)
        self.num_prompt_logprobs[row] = self._asked(params.prompt_logprobs)
        self._logprob_ids[row] = -1
        if params.logprob_token_ids is not None:
            self._logprob_ids[row, : len(params.logprob_token_ids)] = params.logprob_token_ids

    def gather(
        self, rows: np.ndarray, positions: np.ndarray, samples: np.ndarray, num_rows: int
    ) -> np.ndarray:
        """The packed lines [num_rows, NUM_COLUMNS, and those of custom processors] of the scheduled `rows` [R <= num_rows], padded.

        `positions[r]` is the sequence position that the token sampled now will take (`num_computed +
        num_scheduled`): the randomness of a token depends on its seed and position alone. `samples[r]`: see
        `StepPlan`.
        """
        n = len(rows)
        if n == num_rows:
            packed = self._packed[rows]
        else:
            packed = np.empty((num_rows, self._packed.shape[1]), np.int32)
            packed[:n] = self._packed[rows]
            packed[n:] = self._packed[self.max_num_seqs]
        packed[:n, POSITION] = positions
        packed[:n, ACTIVE] = samples
        return packed

    def features(
        self, rows: np.ndarray, samples: np.ndarray, *, masked: bool
    ) -> SamplerFeatures | None:
        """The smallest variant that serves the sampling ones among `rows`, None when none of them samples."""
        sampling = rows[samples]
        if not len(sampling):
            return None
        level = SamplerLevel(self._levels[sampling].max())
        num_logprobs = self.logprobs_rung(self.num_logprobs[sampling].max())
        if level is SamplerLevel.FULL or num_logprobs is not None:
            processed = bool(self._processed[sampling].any())
            return SamplerFeatures(SamplerLevel.FULL, True, num_logprobs, processed)
        return SamplerFeatures(level, masked)

    def logprob_ids(
        self, rows: np.ndarray, num_logprobs: int | None, num_rows: int
    ) -> np.ndarray | None:
        """For a program that returns `num_logprobs`: the tokens whose logprobs `rows` asked for, -1 for the likeliest,
        [num_rows, `logprob_ids_width(num_logprobs)`]. None for a program that returns none."""
        if num_logprobs is None:
            return None
        padded = np.full(num_rows, self.max_num_seqs)
        padded[: len(rows)] = rows
        return self._logprob_ids[padded, : logprob_ids_width(num_logprobs)]

    def feature_groups(
        self, rows: np.ndarray, samples: np.ndarray, masked: np.ndarray
    ) -> list[tuple[SamplerFeatures, np.ndarray]]:
        """The sampling ones among `rows`, each with the variant that serves it alone: variants, and which rows [R] take
        them. `masked[r]`: the step's mask names the row."""
        asked = self.num_logprobs[rows]
        rungs = np.where(asked < 0, 0, 1 + np.searchsorted(self._logprobs_rungs, asked))
        levels = self._levels[rows].astype(np.int64)
        full = (rungs > 0) | (levels == SamplerLevel.FULL)
        keys = np.where(full, -1 - 2 * rungs - self._processed[rows], 2 * levels + masked)
        groups = []
        for key in np.unique(keys[samples]):
            members = samples & (keys == key)
            first = int(np.argmax(members))
            features = self.features(
                rows[first : first + 1], np.ones(1, bool), masked=bool(masked[first])
            )
            assert features is not None
            groups.append((features, members))
        return groups

    def logprobs_rung(self, num_logprobs: int) -> int | None:
        """The static number of top logprobs of the program that serves a request for `num_logprobs`."""
        if num_logprobs < 0:
            return None
        return int(self._logprobs_rungs[np.searchsorted(self._logprobs_rungs, num_logprobs)])

    def mask_words(self, mask: TokenMask | None, num_rows: int) -> np.ndarray:
        """`mask` for all `num_rows` rows of a step: [num_rows, ceil(V / 32)] uint32, ones where nothing is masked."""
        words = np.full((num_rows, -(-self.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        if mask is not None:
            words[mask.positions] = mask.words
        return words

    def take_token_states(self) -> dict[int, np.ndarray]:
        """Token states [V] of the rows admitted with penalties since the last call."""
        taken, self._token_states = self._token_states, {}
        return taken

    def take_biases(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Rows whose logit_bias changed since the last call: token ids and values, [MAX_LOGIT_BIAS] each,
        where the unused entries have the id V."""
        taken, self._biases = self._biases, {}
        return {row: self._padded(*bias) for row, bias in taken.items()}

    def _asked(self, num_logprobs: int | None) -> int:
        if num_logprobs is None:
            return _NO_LOGPROBS
        return self.vocab_size if num_logprobs == -1 else num_logprobs

    def _set_bias(self, row: int, bias: dict[int, float]) -> None:
        if not bias and not self._has_bias[row]:
            return
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(bias)} entries, the limit is {MAX_LOGIT_BIAS}.")
        self._has_bias[row] = bool(bias)
        self._biases[row] = (
            np.fromiter(bias.keys(), np.int32, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )

    def _padded(self, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        padding = (0, MAX_LOGIT_BIAS - len(ids))
        return np.pad(ids, padding, constant_values=self.vocab_size), np.pad(values, padding)


def token_states(
    token_ids: np.ndarray | Sequence[int], num_prompt_tokens: int, vocab_size: int
) -> np.ndarray:
    """The penalties' view of a sequence: [V] uint16, see `PROMPT_BIT`."""
    token_ids = np.asarray(token_ids)
    counts = np.bincount(token_ids[num_prompt_tokens:], minlength=vocab_size)
    states = np.minimum(counts, MAX_COUNT).astype(np.uint16)
    states[token_ids[:num_prompt_tokens]] |= PROMPT_BIT
    return states
