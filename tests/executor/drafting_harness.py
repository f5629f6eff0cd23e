"""Drives a drafter through steps as an engine would, over sequences that are decided beforehand: what the target would
have sampled is the next token of a row's sequence, and its drafts are verified against that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.plan import AdmittedRow, Drafts, StepPlan
from jaxinfer.engine_args import EngineArgs
from jaxinfer.executor.buckets import BucketLadder, StepShape
from jaxinfer.executor.input_batch import PackedLayout
from jaxinfer.executor.kv_cache import allocate
from jaxinfer.executor.program_cache import ProgramCache
from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.executor.speculative.draft_choice import DraftChoice
from jaxinfer.executor.speculative.drafter import DraftStep
from jaxinfer.executor.speculative.load import make_drafter
from jaxinfer.executor.speculative.model_drafter import DrafterSetting, ModelDrafter
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.resolve import open_checkpoint, resolve_model
from tests.tiny_checkpoints import tiny_checkpoint

VOCAB, DIM = 97, 48
NUM_ROWS, BLOCK_SIZE, MAX_BLOCKS = 4, 4, 12
BUDGET = 16


def load(
    method: str,
    path: Path,
    num_drafts: int = 3,
    *,
    tensor_parallel_size: int = 1,
    load_format: str = "auto",
) -> ModelDrafter:
    """The drafter in the directory `path`, its weights yet to be loaded, for a target of `VOCAB` tokens and `DIM` wide
    streams."""
    args = EngineArgs(
        model=str(tiny_checkpoint("llama_biased")),
        load_format=load_format,
        max_model_len=BLOCK_SIZE * MAX_BLOCKS,
        speculative_config=dict(method=method, model=str(path), num_speculative_tokens=num_drafts),
    )
    target = describe_model(open_checkpoint(resolve_model(args.model)).config())
    mesh = make_mesh(tensor_parallel_size)
    decoder = FunctionalDecoder.create(target.spec, mesh, "float32")
    setting = DrafterSetting(
        mesh=mesh,
        ladder=BucketLadder.create(BUDGET, NUM_ROWS, MAX_BLOCKS),
        cache=ProgramCache(1),
        num_rows=NUM_ROWS,
        block_size=BLOCK_SIZE,
        num_drafts=num_drafts,
        choice=DraftChoice(random=False),
        target_embed=jax.ShapeDtypeStruct((VOCAB, DIM), "float32", sharding=replicated(mesh)),
    )
    reader = open_checkpoint(resolve_model(str(path)))
    return make_drafter(args.create_engine_config(target, "cpu"), reader, decoder, setting)


def start(drafter: ModelDrafter) -> None:
    """What the executor does: weights, and a cache whose unwritten slots spoil what reads them."""
    drafter.leaves = drafter.load()
    drafter.num_blocks = NUM_ROWS * MAX_BLOCKS + 1
    cache = allocate(drafter.kv_cache_shapes(drafter.num_blocks))
    drafter.kv_cache = jax.tree.map(lambda pages: (pages * 0).at[1:].set(jnp.nan), cache)


@dataclass
class Row:
    """A request: its whole sequence, what the target has of each position, and how far it is."""

    token_ids: np.ndarray
    num_prompt: int
    streams: np.ndarray
    """[n, A, E]"""
    hidden: np.ndarray
    """[n, E]"""
    computed: int = 0
    known: int = 0
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass
class Drafting:
    """Runs rows to the end of their sequences; `expected(row, known)` says what should be drafted after the first
    `known` tokens. Some rows are short of blocks for their drafts now and then."""

    drafter: ModelDrafter
    rows: list[Row]
    expected: Callable[[Row, int], list[int]]
    embed: np.ndarray
    lookahead: int
    seed: int = 0
    num_checked: int = 0
    num_short: int = 0

    def run(self) -> None:
        rng = np.random.default_rng(self.seed)
        free = (rng.permutation(NUM_ROWS * MAX_BLOCKS) + 1).tolist()
        for row in self.rows:
            row.known = row.num_prompt
        admitted: set[int] = set()
        while alive := [i for i, row in enumerate(self.rows) if row.known < len(row.token_ids)]:
            chosen = [i for i in alive if rng.random() < 0.8] or alive[:1]
            self._step(rng, chosen, free, admitted)

    def _step(
        self, rng: np.random.Generator, chosen: list[int], free: list[int], admitted: set[int]
    ) -> None:
        counts, verified = {}, {}
        left = BUDGET
        for i in chosen:
            row = self.rows[i]
            due = row.known - row.computed
            if due > 1:
                count, verified[i] = min(int(rng.integers(1, 7)), due), []
            else:
                verified[i] = row.drafts[: len(row.token_ids) - row.known - 1]
                count = 1 + len(verified[i])
            counts[i] = min(count, left)
            verified[i] = verified[i][: counts[i] - 1]
            left -= counts[i]
        order = sorted((i for i in chosen if counts[i]), key=lambda i: counts[i] != 1)
        entries, tokens, samples, accepted = [], [], [], []
        for i in order:
            row = self.rows[i]
            end = row.computed + counts[i]
            reach = end + (self.lookahead if rng.random() < 0.6 else 0)
            for column in range(
                len(row.blocks), -(-min(reach, MAX_BLOCKS * BLOCK_SIZE) // BLOCK_SIZE)
            ):
                row.blocks.append(free.pop())
                entries.append((i, column, row.blocks[-1]))
            samples.append(end >= row.known)
            fed = np.concatenate([row.token_ids[: row.known], verified[i]]).astype(np.int32)
            tokens.append(fed[row.computed : end])
            truth = row.token_ids[row.known : row.known + len(verified[i])]
            same = np.cumprod(np.array(verified[i], np.int32) == truth)
            accepted.append(int(same.sum()))
        new = [i for i in order if i not in admitted]
        admitted.update(new)
        table = np.array(entries, np.int32).reshape(-1, 3)
        plan = StepPlan(
            admitted=[
                AdmittedRow(
                    i,
                    self.rows[i].token_ids[: self.rows[i].known].astype(np.int32),
                    self.rows[i].num_prompt,
                    SamplingParams(temperature=0.0),
                )
                for i in new
            ],
            rows=np.array(order, np.int32),
            num_scheduled=np.array([counts[i] for i in order], np.int32),
            num_computed=np.array([self.rows[i].computed for i in order], np.int32),
            samples=np.array(samples),
            block_rows=table[:, 0],
            block_cols=table[:, 1],
            block_ids=table[:, 2],
            drafts=Drafts(
                last_token_ids=np.zeros(len(order), np.int32),
                num_drafts=np.array([len(verified[i]) for i in order], np.int32),
                token_ids=np.concatenate([verified[i] for i in order] or [[]]).astype(np.int32),
                wanted=True,
            ),
        )
        proposal = self.drafter.propose(self._draft_step(plan, tokens, accepted))
        proposed = np.asarray(proposal.token_ids)
        for r, i in enumerate(order):
            row = self.rows[i]
            if not samples[r]:
                assert (proposed[r] == -1).all()
                row.computed += counts[i]
                continue
            row.computed += counts[i] - len(verified[i]) + accepted[r]
            row.known += accepted[r] + 1
            self._check(rng, row, proposed[r])

    def _check(self, rng: np.random.Generator, row: Row, proposed: np.ndarray) -> None:
        drafts = proposed[: np.argmax(proposed < 0) if (proposed < 0).any() else None]
        assert (proposed[len(drafts) :] == -1).all()
        # The last draft's own slot is not needed for it to be drafted.
        K, slots = len(proposed), len(row.blocks) * BLOCK_SIZE - row.known + 1
        possible = K if not self.lookahead else min(K, max(slots, 0) + K - self.lookahead)
        assert len(drafts) == possible
        self.num_short += possible < K
        wanted = self.expected(row, row.known)[: len(drafts)]
        assert drafts.tolist() == wanted
        self.num_checked += len(drafts)
        # What the target verifies next: nothing but the truth for some, and drafts that go wrong somewhere.
        truth = row.token_ids[row.known :][:K]
        row.drafts = [int(t) if rng.random() < 0.7 else int(t + 1) % VOCAB for t in truth]
        row.drafts = row.drafts[: int(rng.integers(0, K + 1))]

    def _draft_step(
        self, plan: StepPlan, tokens: list[np.ndarray], accepted: list[int]
    ) -> DraftStep:
        shape = self.drafter.setting.ladder.shape(plan.num_tokens, len(plan.rows), MAX_BLOCKS)
        packed = self._packed(plan, shape, tokens)
        T, n = shape.num_tokens, plan.num_tokens
        streams = np.zeros((T, *self.rows[0].streams.shape[1:]), np.float32)
        hidden = np.zeros((T, self.rows[0].hidden.shape[1]), np.float32)
        start = 0
        for r, i in enumerate(plan.rows):
            where = slice(plan.num_computed[r], plan.num_computed[r] + plan.num_scheduled[r])
            count = len(self.rows[i].streams[where])
            streams[start : start + count] = self.rows[i].streams[where]
            hidden[start : start + count] = self.rows[i].hidden[where]
            start += plan.num_scheduled[r]
        assert start == n
        sampling = SamplingRows(NUM_ROWS, VOCAB)
        for i in plan.rows.tolist():
            sampling.set_row(i, SamplingParams(temperature=0.0), np.zeros(1, np.int32), 1)
        last, kept = np.zeros(NUM_ROWS + 1, np.int32), np.zeros(NUM_ROWS + 1, np.int32)
        for r, i in enumerate(plan.rows):
            if plan.samples[r]:
                kept[i] = accepted[r]
                last[i] = self.rows[i].token_ids[self.rows[i].known + accepted[r]]
            else:
                last[i], kept[i] = 55, 3  # of another step: nobody's business
        put = lambda x: jax.device_put(x, replicated(self.drafter.setting.mesh))  # noqa: E731
        return DraftStep(
            plan=plan,
            shape=shape,
            packed=packed,
            hidden=put(hidden),
            embed=put(self.embed),
            aux_hidden=tuple(put(streams[:, a]) for a in range(streams.shape[1])),
            last_tokens=put(last),
            num_accepted=put(kept),
            sampling=sampling.gather(
                plan.rows, plan.num_computed + plan.num_scheduled, plan.samples, shape.num_rows
            ),
        )

    def _packed(self, plan: StepPlan, shape: StepShape, tokens: list[np.ndarray]) -> np.ndarray:
        layout = PackedLayout(shape)
        packed = np.zeros(layout.size, np.int32)
        to = layout.views(packed)
        n, R = plan.num_tokens, len(plan.rows)
        to["token_ids"][:n] = np.concatenate(tokens)
        positions = np.concatenate(
            [c + np.arange(s) for c, s in zip(plan.num_computed, plan.num_scheduled, strict=True)]
        )
        to["positions"][:n] = positions
        of = np.repeat(plan.rows, plan.num_scheduled)
        blocks = np.array(
            [self.rows[i].blocks[p // BLOCK_SIZE] for i, p in zip(of, positions, strict=True)]
        )
        to["slot_mapping"][:n] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        ends = np.cumsum(plan.num_scheduled)
        to["query_start_loc"][1 : R + 1] = ends
        to["query_start_loc"][R + 1 :] = n
        to["seq_lens"][:R] = plan.num_computed + plan.num_scheduled
        to["rows"][:R] = plan.rows
        to["rows"][R:] = NUM_ROWS
        for r, i in enumerate(plan.rows):
            to["block_tables"][r, : len(self.rows[i].blocks)] = self.rows[i].blocks
        return packed
