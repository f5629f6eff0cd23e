"""Streamed text against a full decode by the tokenizer itself, and stop strings against a character-by-character oracle."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.frontend.detokenizer import Detokenizer
from jaxinfer.frontend.token_text import TokenText
from jaxinfer.sampling_params import SamplingParams
from tests.frontend.tokenizers_for_tests import (
    byte_level_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
LLAMA = sentencepiece_tokenizer()
GEMMA = sentencepiece_tokenizer(strip=False)
METASPACE = metaspace_tokenizer()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "llama": LLAMA, "gemma": GEMMA, "metaspace": METASPACE}


def token_text(tokenizer):
    return TokenText(tokenizer)


def ids_of(tokenizer, **sizes):
    """Random ids, some of them beyond the vocabulary, as models with padded embeddings can produce."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), **sizes)


def has_broken_byte_run(tokenizer, ids, skip_special):
    """Whether a run of byte tokens is no valid UTF-8. `tokenizers` then gives up the whole run; a stream has emitted
    its good characters before the bad byte comes."""
    special = set(tokenizer.all_special_ids)
    kept = [i for i in ids if not (skip_special and i in special)]
    names = [name for name in tokenizer.convert_ids_to_tokens(kept) if name]
    for run in re.findall(r"(?:<0x[0-9A-F]{2}>)+", "\0".join(names).replace(">\0<", "><")):
        try:
            bytes.fromhex("".join(re.findall(r"[0-9A-F]{2}(?=>)", run))).decode()
        except UnicodeDecodeError:
            return True
    return False


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_full_decode(name, skip_special, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer, max_size=30))
    if has_broken_byte_run(tokenizer, ids, skip_special):
        return
    stream = token_text(tokenizer).stream([], skip_special)
    text = ""
    position = 0
    while position < len(ids):
        count = data.draw(st.integers(1, 3))
        text += stream.push(ids[position : position + count])
        position += count
        if has_broken_byte_run(tokenizer, ids[:position], skip_special):
            continue
        so_far = tokenizer.decode(ids[:position], skip_special_tokens=skip_special)
        assert so_far.startswith(text)
        assert len(so_far) - len(text) <= 3, "more is held back than an unfinished character"
    assert text + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_after_a_prompt_is_what_it_adds_to_the_prompt(name, data):
    tokenizer = TOKENIZERS[name]
    prompt = data.draw(ids_of(tokenizer, min_size=1, max_size=8))
    ids = data.draw(ids_of(tokenizer, max_size=8))
    if any(has_broken_byte_run(tokenizer, part, True) for part in (prompt, prompt + ids)):
        return
    whole = tokenizer.decode(prompt + ids)
    before = tokenizer.decode(prompt)
    stream = token_text(tokenizer).stream(prompt, True)
    text = stream.push(ids) + stream.flush()
    # What the prompt leaves unfinished, at most three bytes, belongs to what comes after it.
    kept = whole.removesuffix(text)
    assert kept + text == whole
    assert before.startswith(kept) and before.removeprefix(kept) in (
        "",
        *("\ufffd" * n for n in (1, 2, 3)),
    )


@settings(max_examples=150, deadline=None)
@given(ids_of(LLAMA, max_size=20))
def test_a_bad_byte_costs_no_good_character(ids):
    """Where `tokenizers` replaces a whole run of byte tokens, the stream replaces only what is no character."""
    names = [name or "" for name in LLAMA.convert_ids_to_tokens(ids)]
    data = b"".join(
        bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
        for name in names
    )
    stream = token_text(LLAMA).stream([], False)
    text = "".join(stream.push([i]) for i in ids) + stream.flush()
    assert text == data.decode("utf-8", "replace").removeprefix(" ")


def test_half_a_character_waits_for_its_other_half():
    ids = BYTE_LEVEL.encode("é🙂")
    stream = token_text(BYTE_LEVEL).stream([], True)
    deltas = [stream.push([i]) for i in ids]
    assert "".join(deltas) == "é🙂" and "\ufffd" not in "".join(deltas)
    assert stream.push(BYTE_LEVEL.encode("🙂")[:1]) == "" and stream.flush() == "\ufffd"


def test_peek_shows_a_character_with_the_token_that_completes_it():
    first, *rest = [BYTE_LEVEL.backend.token_to_id(c) for c in "Ã©"]
    stream = token_text(BYTE_LEVEL).stream([], False)
    assert stream.peek(first) == "" and stream.peek(rest[0]) == ""
    stream.push([first])
    assert stream.peek(rest[0]) == "é"
    assert stream.peek(BYTE_LEVEL.encode("a")[0]) == "a"


# ---- stop strings ----------------------------------------------------------------------------------------------------


class Letters:
    """A stream whose tokens are words of a list: text is cut into tokens as a test likes."""

    def __init__(self, words):
        self._words = words

    def push(self, token_ids):
        return "".join(self._words[i] for i in token_ids)

    def flush(self):
        return ""


def run(words, **params):
    """All deltas, the stop string that ended them, and the number of tokens used."""
    detokenizer = Detokenizer(Letters(words), SamplingParams(max_tokens=None, **params))
    deltas = []
    for i in range(len(words)):
        hit = detokenizer.push([i])
        deltas.append(detokenizer.take())
        if hit is not None:
            assert hit[0] == 1
            return deltas, hit[1], i + 1
    detokenizer.finish()
    return [*deltas, detokenizer.take()], None, len(words)


def oracle(words, stops, include, min_tokens):
    """Character by character: the first stop string that is complete, unless it ends within the first tokens."""
    text = ""
    for number, word in enumerate(words, 1):
        for char in word:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and number > min_tokens:
                stop = max(ended, key=len)
                return text if include else text.removesuffix(stop), stop, number
    return text, None, len(words)


words_strategy = st.lists(st.text("abc", max_size=3), max_size=12)
stops_strategy = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(words_strategy, stops_strategy, st.booleans(), st.integers(0, 4))
def test_stop_strings_against_the_oracle(words, stops, include, min_tokens):
    deltas, stop, used = run(
        words, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    text, expected_stop, expected_used = oracle(words, stops, include, min_tokens)
    assert ("".join(deltas), used) == (text, expected_used)
    assert stop == expected_stop


@settings(max_examples=150, deadline=None)
@given(words_strategy, stops_strategy)
def test_nothing_is_held_that_cannot_become_a_stop_string(words, stops):
    deltas, _, used = run(words, stop=stops)
    released = held = ""
    for word, delta in zip(words[: used - 1], deltas, strict=False):
        held = (held + word).removeprefix(delta) if (held + word).startswith(delta) else None
        released += delta
        assert held is not None
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
        assert len(held) < max(map(len, stops))


def test_alphabet_is_held_back_and_flushed():
    words = ["D", "EF", "GHI", "X", "DEF"]
    deltas, stop, _ = run(words, stop="DEFGHIJ")
    assert deltas == ["", "", "", "DEFGHIX", "", "DEF"] and stop is None
    deltas, stop, used = run(["C", "DEF", "GHIJK", "L"], stop="DEFGHIJ")
    assert deltas == ["C", "", ""] and (stop, used) == ("DEFGHIJ", 3)


def test_several_tokens_at_once_stop_at_the_right_one():
    detokenizer = Detokenizer(Letters(["a", "b", "c", "d"]), SamplingParams(stop="bc"))
    assert detokenizer.push([0, 1, 2, 3]) == (3, "bc")
    assert detokenizer.take() == "a"
