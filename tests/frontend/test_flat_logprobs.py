"""`FlatLogprobs` against the list of dicts that the same steps give."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from jaxinfer.engine.messages import TokenLogprobs
from jaxinfer.frontend.logprobs import logprob_history
from jaxinfer.frontend.token_text import TokenText
from tests.frontend.tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TEXT = TokenText(TOKENIZER)
CONTEXT = TOKENIZER.encode("日本語の")
TOKENS = TOKENIZER.encode("日本🙂é x")


def scored() -> list[TokenLogprobs]:
    """Three candidates for each token, itself among them at every other position."""
    rng = np.random.default_rng(0)
    positions = []
    for i, token in enumerate(TOKENS):
        others = rng.integers(3, TOKENIZER.vocab_size, 3).tolist()
        if i % 2:
            others[1] = token
        values = rng.integers(-64, 0, 4) / 8  # float32 holds them
        positions.append(TokenLogprobs([token, *others], values.tolist(), 2 if i % 2 else 9))
    return positions


def histories(**more):
    made = [logprob_history(TEXT, CONTEXT, flat=flat, **more) for flat in (False, True)]
    for history in made:
        for position in scored():
            history.add([position])
    return made


@pytest.mark.parametrize("more", [{}, {"ranked": False}, {"is_prompt": True}])
def test_items_slices_and_sums_are_those_of_the_list(more):
    dicts, flat = (history.since(0) for history in histories(**more))
    assert list(flat) == dicts and len(flat) == len(dicts)
    assert flat[-1] == dicts[-1] and flat[2] == dicts[2] and dicts[3] in flat
    with pytest.raises(IndexError):
        flat[len(dicts)]
    assert list(flat[2:5]) == dicts[2:5] and list(flat[5:2]) == []
    assert list(flat[:3] + flat[3:]) == dicts and flat[:3] + flat[3:] == flat
    assert flat != flat[1:]
    with pytest.raises(ValueError, match="step of 1"):
        flat[::2]


def test_later_parts_are_decoded_in_the_context_of_earlier_ones():
    dicts, flat = histories()
    for start in range(len(TOKENS)):
        assert list(flat.since(start)) == dicts.since(start)
    texts = flat.since(0).decoded_tokens
    assert "".join(texts[::4]) == TOKENIZER.decode(TOKENS)


def test_what_was_handed_out_does_not_grow():
    _, history = histories()
    early = history.since(1)
    history.add(scored())
    assert len(early) == len(TOKENS) - 1 == len(list(early))


def test_nothing_is_decoded_before_it_is_read_and_pickling_keeps_it():
    calls = []

    class Counting(TokenText):
        def stream(self, *args):
            calls.append(args)
            return super().stream(*args)

    history = logprob_history(Counting(TOKENIZER), CONTEXT, flat=True)
    history.add(scored())
    flat = history.since(0)
    assert flat.token_ids.dtype == flat.ranks.dtype == np.int32
    assert flat.logprobs.dtype == np.float32 and not calls
    copy = pickle.loads(pickle.dumps(flat))
    assert len(calls) == 1 and list(copy) == list(flat) and copy == flat


def test_without_text():
    history = logprob_history(None, CONTEXT, flat=True)
    history.add(scored())
    assert all(p.decoded_token is None for position in history.since(0) for p in position.values())
