"""Which tokens a row may sample, as packed bits for the device: min_tokens, allowed_token_ids, bad words, grammars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from jaxinfer.engine.grammars import GrammarBackend, Matcher
from jaxinfer.engine.plan import Drafts, Int32, TokenMask, Words
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import Batch, ScheduledStep
from jaxinfer.engine.thinking import fill_masks


def pack_tokens(token_ids: Iterable[int], vocab_size: int) -> Words:
    """uint32 words in which bit v%32 of word v//32 is set for each of `token_ids` within the vocabulary."""
    ids = np.array([i for i in token_ids if 0 <= i < vocab_size], np.int64)
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _after_drafts(
    drafts: Drafts, positions: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], list[Int32]]:
    """Each of the `positions` once without drafts and once after each of them; and which drafts come before."""
    starts = np.cumsum(drafts.num_drafts) - drafts.num_drafts
    each: list[int] = []
    before: list[Int32] = []
    for position in positions.tolist():
        count, start = int(drafts.num_drafts[position]), int(starts[position])
        own = drafts.token_ids[start : start + count]
        each += [position] * (count + 1)
        before += [own[:j] for j in range(count + 1)]
    return np.array(each, np.intp), before


class TokenMaskBuilder:
    """Builds a planned step's mask from the row table, once the output that it depends on has been read."""

    def __init__(self, table: RowTable, grammars: GrammarBackend | None = None) -> None:
        self._table = table
        self._grammars = grammars
        self._every_token = pack_tokens(range(table.vocab_size), table.vocab_size)

    def needs_output(self, step: ScheduledStep) -> bool:
        """Whether a row's mask depends on a token that is still being sampled by an earlier step."""
        table, rows = self._table, step.batch.rows
        if not table.num_maskable:
            return False
        read = table.num_prompt[rows] + table.num_output[rows]
        unread = read < table.num_tokens[rows] - step.plan.samples
        return any(
            step.batch.requests[i].is_guided or bool(step.batch.requests[i].bad_sequences)
            for i in np.flatnonzero(unread & step.plan.samples & table.always_masked[rows])
        )

    def build(self, step: ScheduledStep) -> tuple[TokenMask | None, list[Request]]:
        """The step's mask, None where no row is restricted, and the requests that are left without any token.

        The latter must not go on; their masks allow everything, so that the device has something to sample.
        """
        table, batch = self._table, step.batch
        if not table.num_maskable:
            return None, []
        rows = batch.rows
        num_output = table.num_tokens[rows] - 1 - table.num_prompt[rows]
        no_stop = num_output < table.min_tokens[rows]
        restricted = no_stop | table.always_masked[rows]
        positions = np.flatnonzero(restricted & step.plan.samples & batch.live(table))
        if not positions.size:
            return None, []
        no_stop = no_stop[positions]
        before: list[Int32] | None = None
        num_before = None
        if step.plan.drafts is not None and step.plan.drafts.num_drafts[positions].any():
            positions, before = _after_drafts(step.plan.drafts, positions)
            num_before = np.array([len(drafts) for drafts in before], np.int32)
            no_stop = num_output[positions] + num_before < table.min_tokens[rows[positions]]
        words = np.repeat(self._every_token[None], len(positions), axis=0)
        guided = self._fill_guided(batch, positions, before, words)
        without_stop = np.flatnonzero(no_stop)
        words[without_stop] &= ~table.stop_words[rows[positions[without_stop]]]
        for i in np.flatnonzero(table.always_masked[rows[positions]]).tolist():
            request = batch.requests[positions[i]]
            if i in guided and not words[i].any():
                # The grammar is at its end, which min_tokens can't put off.
                words[i] = guided[i]
            words[i] &= self._allowed_words(request)
            for token in self._completions(request, None if before is None else before[i]):
                words[i, token >> 5] &= ~np.uint32(1 << (token & 31))
        none_left = ~words.any(axis=1)
        if num_before is not None:
            none_left &= num_before == 0
        stuck = np.flatnonzero(none_left)
        words[stuck] = self._every_token
        return (
            TokenMask(positions.astype(np.int32), words, num_before),
            [batch.requests[positions[i]] for i in stuck],
        )

    def _fill_guided(
        self,
        batch: Batch,
        positions: npt.NDArray[np.intp],
        before: list[Int32] | None,
        words: Words,
    ) -> dict[int, Words]:
        """Write the tokens that grammars allow; returns a copy of those of rows that also have min_tokens."""
        if not self._table.num_guided:
            return {}
        matchers: list[tuple[Matcher, int]] = []
        with_minimum = []
        for i, position in enumerate(positions.tolist()):
            request = batch.requests[position]
            if request.matcher is not None:
                if before is None or not len(before[i]):
                    matchers.append((request.matcher, i))
                if request.min_tokens:
                    with_minimum.append(i)
        if matchers:
            fill_masks(self._grammars, matchers, words)
            if before is not None:
                for matcher, i in matchers:
                    self._follow(matcher, i, before, words)
        return {i: words[i].copy() for i in with_minimum}

    def _follow(self, matcher: Matcher, first: int, before: list[Int32], words: Words) -> None:
        """Write what may follow in a row's grammar after each of its drafts, whose words come after words[first]. After
        one that the grammar refuses or ends with, nothing is sampled that counts."""
        matcher = matcher.copy()
        for i in range(first + 1, len(before)):
            if not len(before[i]):
                return
            if matcher.accept(int(before[i][-1])) is not None or matcher.is_finished:
                return
            fill_masks(self._grammars, [(matcher, i)], words)

    def _allowed_words(self, request: Request) -> Words:
        """What allowed_token_ids and bad words of one token leave, whatever the output is."""
        if request.allowed_words is None:
            params, vocab_size = request.sampling_params, self._table.vocab_size
            words = self._every_token
            if params.allowed_token_ids is not None:
                words = pack_tokens(params.allowed_token_ids, vocab_size)
            banned = [word[0] for word in params.bad_words_token_ids or [] if len(word) == 1]
            request.allowed_words = words & ~pack_tokens(banned, vocab_size)
        return request.allowed_words

    def _completions(self, request: Request, drafts: Int32 | None) -> Iterator[int]:
        """Tokens that would complete a bad word whose other tokens end the output, with these `drafts` after it."""
        if not request.bad_sequences:
            return
        longest = max(len(word) for word in request.bad_sequences) - 1
        output = self._table.output_token_ids(request.row)[-longest:].tolist()
        if drafts is not None:
            output += drafts.tolist()
        for *beginning, last in request.bad_sequences:
            if output[-len(beginning) :] == beginning and 0 <= last < self._table.vocab_size:
                yield last
