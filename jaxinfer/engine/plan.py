"""One step, as the scheduler plans it and as the executor answers it.

A request that runs holds a *row*, a small integer that indexes every per-request array on both sides. A plan
carries only what changed (admissions, new block-table entries) and what to compute, as flat numpy arrays; the
executor keeps its own mirror of the rows. Sampled tokens stay on the device: the executor feeds a row's last
sampled token into the row's next position by itself, so that a step can be launched before the tokens of the one
before it have been read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.messages import Pooling
    from jaxinfer.engine.step_costs import StepCosts

Int32 = npt.NDArray[np.int32]
"""A one-dimensional int32 array; its length is given by an axis letter where it is used."""

SLEEP_TAGS = ("weights", "kv_cache")

Bool = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A request that enters (or, after a preemption, re-enters) the batch at `row`.

    `token_ids` are all tokens known at this moment: the prompt and, after a preemption, what was generated. Every
    position at or after `len(token_ids)` is fed from the device.
    """

    row: int
    token_ids: Int32
    num_prompt_tokens: int
    sampling_params: SamplingParams
    adapter_slot: int = 0
    """Of those that `StepPlan.adapters` fill, from 1 on; 0: without an adapter."""
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What `Executor.read_adapter` called `key` goes into `slot` (from 1 on), over what is there."""

    slot: int
    key: str


MAX_PREFIX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """G groups of a plan's rows, 1 to `MAX_PREFIX_GROUPS`: the first `num_rows[0]` rows hold the same first
    `num_blocks[0]` blocks, the next `num_rows[1]` rows the same first `num_blocks[1]`, and so on.

    All keys and values in these blocks come before the tokens that the step computes.
    """

    num_rows: Int32
    num_blocks: Int32


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """What a running row's grammar leaves no choice of: its tokens from position `start` on. The step before sampled
    the first of them, from a mask that allowed no other; the rest was not sampled at all."""

    row: int
    start: int
    token_ids: Int32


@dataclass(frozen=True, slots=True)
class Drafts:
    """What engines with speculation add to a plan of R rows: every input token that an admission didn't bring.

    `last_token_ids[r]` is the row's last known token, which such a row computes now (0 for rows whose tokens are all
    among those they were admitted with, or forced). After it come the row's `num_drafts[r]` guesses, of the flat
    `token_ids`: they count in `num_scheduled`, and the step samples a token after each of them. A guess may be one
    that the row's mask excludes; then it is its last one. `wanted`: an executor that drafts is to do so for the rows
    that sample, in this step's result.
    """

    last_token_ids: Int32
    num_drafts: Int32
    token_ids: Int32
    wanted: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to compute in one step, for R scheduled rows. Rows that compute one token come first.

    `num_computed[r]` tokens of the row are already in the KV cache; this step computes the `num_scheduled[r]` after
    them. `samples[r]`: the step reaches the row's last token, so a new one is sampled. `block_*` are the U new
    entries of the block tables: entry `block_cols[u]` of row `block_rows[u]` becomes `block_ids[u]`. Admissions
    apply before block entries.

    Each group of layers (`CacheConfig.windows`) has a block table of its own. With G > 1 of them `block_ids` is [G, U],
    and 0 where the row holds nothing that the group's window reaches. Entries that fell out of a window are not taken
    back: nobody looks at them, and from the step on in which they did another row may write to these blocks.

    A row may be admitted with `num_computed` > 0: these tokens lie in full blocks that an earlier row filled, or that
    another row of this very step fills. So in each layer, all keys and values of the step are written before any of
    its rows reads. Such blocks are only read; what a row computes goes to blocks that it has for itself.

    `forced` are tokens of running rows that the host knows; they apply before anything is computed. `prefix_groups`
    may be given where each row computes one token. `drafts` is given in every step of an engine with speculation, and
    in no step of another. `adapters` apply before anything is computed, and after all of the steps before: no row of this
    step or a later one has what was in these slots.

    `rows` is the same array object as the step before's where the batch hasn't changed.
    """

    admitted: list[AdmittedRow]
    rows: Int32
    num_scheduled: Int32
    num_computed: Int32
    samples: Bool
    block_rows: Int32
    block_cols: Int32
    block_ids: Int32
    forced: list[ForcedTokens] = field(default_factory=list)
    prefix_groups: PrefixGroups | None = None
    drafts: Drafts | None = None
    adapters: list[AdapterLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled.sum())


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Tokens that rows may sample: bit v%32 of `words[i, v//32]` (uint32) is set where `positions[i]`, an index into
    the plan's rows, may produce token v after its first `num_before[i]` drafts (None: 0). What is not listed may be any
    token. Words of a row's later positions may be all zero: nothing can follow these drafts."""

    positions: Int32
    words: Words
    num_before: Int32 | None = None


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Logprobs of N positions: column 0 the chosen token, then K candidates, best first. `ranks` counts from 1."""

    token_ids: Int32  # [N, K + 1] int32
    logprobs: npt.NDArray[np.float32]  # [N, K + 1] float32
    ranks: Int32  # [N] int32


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a plan, aligned with its rows: `token_ids[r]` where the row samples (anything elsewhere).

    `invalid[r]`: the row's logits held a NaN and no token can be trusted. `logprobs` covers all R rows when any of
    them asked. `prompt_logprobs` maps an index into the plan's rows to the prompt positions that this step scored:
    the logprobs of prompt tokens num_computed+1 … (the first prompt token has none).

    With `num_tokens`, row r got the next `num_tokens[r]` of the flat `token_ids` and `logprobs`: as many of its drafts
    as were sampled again, and the token after them. 1 for rows without drafts, and where `invalid`.

    `draft_token_ids` [R, K]: guesses for the tokens after those of this result, a row's as many as come before its
    first -1, by an executor that drafts.

    `pooled` maps an index into the plan's rows to what a request for vectors gets, where its prompt is computed. Such a
    row's token says nothing, and `invalid` is about its vectors.
    """

    token_ids: Int32
    invalid: Bool
    logprobs: LogprobArrays | None = None
    prompt_logprobs: dict[int, LogprobArrays] = field(default_factory=dict)
    num_tokens: Int32 | None = None
    draft_token_ids: npt.NDArray[np.int32] | None = None
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the device and return the step's tokens."""
        ...


class Executor(Protocol):
    """The device side, as the engine core sees it. `execute_model` then `sample_tokens`, once per step, in order.

    Both return before the device has finished; `StepHandle.result` waits. Plans are executed in the order in which
    they are given, so a block freed by one step can be handed out in the next.
    """

    on_compile: Callable[[], None] | None
    """Called, in the thread that executes, before that waits for a program to be compiled."""

    @property
    def num_blocks(self) -> int:
        """Size of the block pool, counting the padding block 0."""
        ...

    @property
    def num_compilations(self) -> int:
        """Programs that were compiled since the executor was ready: requests had to wait for them."""
        ...

    @property
    def step_costs(self) -> StepCosts: ...

    def device_memory(self) -> DeviceMemory: ...

    def execute_model(self, plan: StepPlan) -> None:
        """Launch the forward pass of `plan`."""
        ...

    def sample_tokens(self, mask: TokenMask | None) -> StepHandle:
        """Launch the sampling of the plan last given to `execute_model`."""
        ...

    @property
    def asleep(self) -> Collection[str]:
        """Which of `SLEEP_TAGS` the device doesn't hold. Nothing may be executed until it is empty."""
        ...

    def read_adapter(self, path: str) -> str:
        """Read the adapter in the folder `path` into the host's memory. Returns the key of its content: that of another
        adapter is another, and of an equal one the same. Raises `ValueError` where it doesn't fit the model."""
        ...

    def drop_adapter(self, key: str) -> None:
        """Free the host's memory of it; slots that hold it keep it."""
        ...

    def sleep(self, level: int) -> None:
        """Free the device's memory of all of them; at level 1, weights stay with the host."""
        ...

    def wake_up(self, tags: Collection[str]) -> None:
        """Take these back. The KV cache's blocks hold nothing then."""
        ...

    def shutdown(self) -> None: ...
