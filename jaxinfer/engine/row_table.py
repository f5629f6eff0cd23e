"""The numbers of all running requests, one numpy array per number, indexed by row."""

from __future__ import annotations

import numpy as np

from jaxinfer.engine.plan import Bool, Int32
from jaxinfer.engine.request import NO_ROW, Request

_FIRST_OUTPUT_CAPACITY = 64


class RowTable:
    """S rows, each held by one running request or free.

    num_tokens      all tokens: prompt, output, and those being sampled on the device
    num_computed    tokens whose keys and values are in the cache, or will be after the steps in flight
    num_output      output tokens that have been read
    max_total       the most that `num_tokens` may become
    epoch           grows each time the row is released: a row of an earlier step is still the same request's where
                    the epoch is the same
    stop_words      bit v%32 of `stop_words[s, v//32]`: token v ends the request
    always_masked   the row's tokens are restricted in every step
    guided          the row's output follows a grammar

    `num_maskable` counts the rows that may need a mask in some step, `num_guided` those that are guided.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.num_output = np.zeros(num_rows, np.int32)
        self.max_total = np.zeros(num_rows, np.int32)
        self.min_tokens = np.zeros(num_rows, np.int32)
        self.epoch = np.zeros(num_rows, np.int64)
        self.always_masked = np.zeros(num_rows, np.bool_)
        self.stop_words = np.zeros((num_rows, -(-vocab_size // 32)), np.uint32)
        self.requests: list[Request | None] = [None] * num_rows
        self.guided = np.zeros(num_rows, np.bool_)
        self.num_maskable = 0
        self.num_guided = 0
        self._outputs = np.empty((num_rows, _FIRST_OUTPUT_CAPACITY), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, request: Request, num_computed: int = 0) -> int:
        """Give the request a row. `num_computed` of its tokens were found in the cache."""
        row = self._free.pop()
        output = request.output_token_ids
        self.requests[row] = request
        request.row = row
        self.num_prompt[row] = len(request.prompt_token_ids)
        self.num_output[row] = len(output)
        self.num_tokens[row] = request.num_known_tokens
        self.num_computed[row] = num_computed
        self.max_total[row] = request.max_total_tokens
        self.min_tokens[row] = request.min_tokens
        self.always_masked[row] = masked = request.always_masked
        self.num_maskable += masked or request.min_tokens > 0
        self.guided[row] = request.is_guided
        self.num_guided += request.is_guided
        self._reserve(len(output))
        self._outputs[row, : len(output)] = output
        for token in self._stop_ids(request):
            self.stop_words[row, token >> 5] |= np.uint32(1 << (token & 31))
        return row

    def release(self, request: Request) -> None:
        """Take the row away, leaving the output so far with the request."""
        row = request.row
        request.output_token_ids = self.output_token_ids(row).copy()
        request.num_in_flight = int(
            self.num_tokens[row] - self.num_prompt[row] - self.num_output[row]
        )
        request.row = NO_ROW
        self.requests[row] = None
        self.epoch[row] += 1
        self.num_maskable -= request.always_masked or request.min_tokens > 0
        self.num_guided -= request.is_guided
        for token in self._stop_ids(request):
            self.stop_words[row, token >> 5] = 0
        self._free.append(row)

    def append_tokens(self, rows: Int32, tokens: Int32) -> Int32:
        """Append one token to the output of each of `rows` [N] (distinct). Returns the new output lengths [N]."""
        lengths = self.num_output[rows]
        self._reserve(int(lengths.max(initial=0)) + 1)
        self._outputs[rows, lengths] = tokens
        lengths += 1
        self.num_output[rows] = lengths
        return lengths

    def append_runs(self, rows: Int32, tokens: Int32, counts: Int32) -> None:
        """Append the next `counts[n]` of the flat `tokens` to the output of each of `rows` [N] (distinct)."""
        lengths = self.num_output[rows]
        self._reserve(int((lengths + counts).max(initial=0)))
        first = lengths - (np.cumsum(counts) - counts)
        self._outputs[
            np.repeat(rows, counts), np.arange(len(tokens)) + np.repeat(first, counts)
        ] = tokens
        self.num_output[rows] = lengths + counts

    def last_output_tokens(self, rows: Int32) -> Int32:
        """The last output token of each of `rows` [N], anything where there is none."""
        return self._outputs[rows, np.maximum(self.num_output[rows] - 1, 0)]

    def token_ids(self, row: int, start: int, stop: int) -> Int32:
        """The known tokens at positions [start, stop) of prompt and output."""
        request = self.requests[row]
        assert request is not None
        num_prompt = len(request.prompt_token_ids)
        output = self._outputs[row, max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        if start >= num_prompt:
            return output
        return np.concatenate([request.prompt_token_ids[start:stop], output])

    def output_token_ids(self, row: int) -> Int32:
        """The output that has been read so far, as a view."""
        return self._outputs[row, : self.num_output[row]]

    def is_stop_token(self, rows: Int32, tokens: Int32) -> Bool:
        """Whether each token [N] is one that ends its row's request."""
        words = self.stop_words[rows, tokens >> 5]
        stops: Bool = (words >> (tokens & 31).astype(np.uint32)) & 1 != 0
        return stops

    def _stop_ids(self, request: Request) -> list[int]:
        ids = request.eos_token_ids | request.stop_token_ids
        return [i for i in ids if 0 <= i < self.vocab_size]

    def _reserve(self, length: int) -> None:
        """Make room for outputs of this length; the room doubles, so that short outputs cost little memory."""
        num_rows, capacity = self._outputs.shape
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        grown = np.empty((num_rows, capacity), np.int32)
        grown[:, : self._outputs.shape[1]] = self._outputs
        self._outputs = grown
