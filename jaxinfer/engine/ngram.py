"""Drafts from the sequence itself: what followed the last few tokens when they stood there before."""

from __future__ import annotations

import numpy as np

from jaxinfer.engine.plan import Int32


def ngram_drafts(tokens: Int32, longest: int, shortest: int, num_drafts: int) -> Int32:
    """At most `num_drafts` of the tokens that follow the first earlier occurrence of the last n of `tokens` [N], for
    the largest n from `shortest` to `longest` that there is one of. Saxena 2023, "Prompt Lookup Decoding".

    Takes about 10 µs for 4,000 tokens: all comparisons are of whole arrays, and each n looks only at what the one before
    it has left.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = -1
    for n in range(1, longest + 1):
        if n > 1:
            if ends.size and ends[0] < n - 1:
                ends = ends[ends >= n - 1]
            ends = ends[tokens[ends - (n - 1)] == tokens[-n]] if ends.size else ends
        if not ends.size:
            break
        if n >= shortest:
            found = int(ends[0])
    if found < 0:
        return tokens[:0]
    return tokens[found + 1 : found + 1 + num_drafts]
