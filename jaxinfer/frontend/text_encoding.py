"""Texts to token ids where what is too long may be cut, and pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

    from jaxinfer.frontend.tokenizer import Tokenizer


class EncodedText(NamedTuple):
    """`second_text`: the index of the first token that belongs to the second text of a pair, where the tokenizer tells."""

    ids: list[int]
    second_text: int | None = None


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], keep: int | None, add_special_tokens: bool = True
) -> list[EncodedText]:
    """`keep`: cut to so many tokens in all, before special tokens are put around. On all cores.

    Raises `ValueError` for a text that no bytes stand for.
    """
    backend = tokenizer.backend
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise ValueError("input holds a lone surrogate, which is no character.") from error
    encoded = [EncodedText(encoding.ids) for encoding in encodings]
    if keep is None:
        return encoded
    room = keep - (backend.num_special_tokens_to_add(False) if add_special_tokens else 0)
    _check_room(keep, room)
    for i, text in enumerate(texts):
        if len(encoded[i].ids) > keep:
            bare = backend.encode(text, add_special_tokens=False)
            bare.truncate(room)
            whole = backend.post_process(bare, add_special_tokens=add_special_tokens)
            encoded[i] = EncodedText(whole.ids)
    return encoded


def encode_pair(tokenizer: Tokenizer, first: str, second: str, keep: int | None) -> EncodedText:
    """Both texts with the special tokens that the model has between them; of the longer one more is cut."""
    backend = tokenizer.backend
    try:
        both = backend.encode(first, second)
        if keep is not None and len(both.ids) > keep:
            room = keep - backend.num_special_tokens_to_add(True)
            _check_room(keep, room)
            a = backend.encode(first, add_special_tokens=False)
            b = backend.encode(second, add_special_tokens=False)
            num_first, num_second = _shares(len(a.ids), len(b.ids), room)
            a.truncate(num_first)
            b.truncate(num_second)
            both = backend.post_process(a, b)
    except TypeError as error:
        raise ValueError("The texts hold a lone surrogate, which is no character.") from error
    return EncodedText(both.ids, _second_text(both))


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Of two texts, by taking tokens away from whichever is longer."""
    excess = first + second - room
    from_longer = min(abs(first - second), excess)
    rest = excess - from_longer
    if first >= second:
        return first - from_longer - rest // 2, second - (rest - rest // 2)
    return first - rest // 2, second - from_longer - (rest - rest // 2)


def _check_room(keep: int, room: int) -> None:
    if room < 1:
        raise ValueError(
            f"truncate_prompt_tokens is {keep}, which leaves no room beside the special tokens."
        )


def _second_text(encoding: tokenizers.Encoding) -> int | None:
    return encoding.type_ids.index(1) if 1 in encoding.type_ids else None
