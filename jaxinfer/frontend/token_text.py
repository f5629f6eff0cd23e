"""From token ids to text, one token at a time.

Language-model tokenizers are, with few exceptions, concatenations: each token stands for some bytes, and the text is
the UTF-8 of all of them. So the text can be grown in time proportional to the new tokens, exactly, by keeping the at
most three bytes of an unfinished character. Tokenizers of any other kind are decoded over a short window.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""A window that still ends in a broken character after so many tokens will not be repaired by the next one."""


class Tokenizer(Protocol):
    """What decoding needs of a tokenizer."""

    all_special_ids: list[int]

    @property
    def decoder(self) -> dict[str, Any] | None:
        """The `decoder` section of the tokenizer's tokenizer.json."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> Sequence[str | None]: ...


class TextStream(Protocol):
    """The text of a growing sequence of tokens. What `push` and `flush` return, joined, is the whole text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; never the broken half of a character that the next token may complete."""
        ...

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for a character that never became whole."""
        ...

    def peek(self, token_id: int) -> str:
        """What the token would add here, without adding it: "" when it only begins or continues a character."""
        ...


class TokenText:
    """Makes text streams for one tokenizer; keeps the bytes of the tokens seen so far for all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        to_bytes = _token_to_bytes(decoder)
        self._strips_first_space = to_bytes is not None and _strips_first_space(decoder)
        self._tables: tuple[_TokenBytes, _TokenBytes] | None = None
        if to_bytes is not None:
            self._tables = (
                _TokenBytes(tokenizer, to_bytes, frozenset()),
                _TokenBytes(tokenizer, to_bytes, frozenset(tokenizer.all_special_ids)),
            )

    def stream(self, context: Sequence[int], skip_special_tokens: bool) -> TextStream:
        """The text that follows the tokens `context`, which may end within a character."""
        if self._tables is None:
            return _WindowStream(self._tokenizer, context, skip_special_tokens)
        table = self._tables[skip_special_tokens]
        at_start = self._strips_first_space and not any(table[t] for t in context)
        return _ByteStream(table, context, at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, special tokens as they are spelt; it may be part of a character."""
        if self._tables is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._tables[0][token_id]


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, looked up when first needed (vocabularies are large, texts use little of them)."""

    def __init__(
        self, tokenizer: Tokenizer, to_bytes: Callable[[str], bytes], left_out: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes
        self._left_out = left_out

    def __missing__(self, token_id: int) -> bytes:
        data = b""
        if token_id not in self._left_out:
            token = self._tokenizer.convert_ids_to_tokens([token_id])[0]
            data = self._to_bytes(token) if token else b""
        self[token_id] = data
        return data


class _ByteStream:
    __slots__ = ("_at_start", "_pending", "_table")

    def __init__(self, table: _TokenBytes, context: Sequence[int], at_start: bool) -> None:
        self._table = table
        self._at_start = at_start
        tail = b""
        for token_id in reversed(context):
            tail = table[token_id] + tail
            if len(tail) >= 4:
                break
        _, used = codecs.utf_8_decode(tail, "replace", False)
        self._pending = tail[used:]

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            data = self._pending + table[token_ids[0]]
        else:
            data = self._pending + b"".join([table[t] for t in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:] if used < len(data) else b""
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def peek(self, token_id: int) -> str:
        return (self._pending + self._table[token_id]).decode("utf-8", "ignore")


class _WindowStream:
    """Decodes the tokens since the last but one complete text, and takes what that adds to the last one."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context[-_MAX_HELD_TOKENS:])
        self._num_read = len(self._ids)
        self._read_text = self._decode(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        if len(text) <= len(self._read_text):
            return ""
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < _MAX_HELD_TOKENS:
            return ""
        new = text[len(self._read_text) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._read_text = self._decode(self._ids)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._read_text) :]

    def peek(self, token_id: int) -> str:
        text = self._decode([*self._ids, token_id])
        return "" if text.endswith(REPLACEMENT) else text[len(self._read_text) :]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _strips_first_space(decoder: dict[str, Any] | None) -> bool:
    return decoder is not None and any(step["type"] == "Strip" for step in _steps(decoder))


def _token_to_bytes(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """How a token's name gives its bytes, or None when the decoder is not a concatenation."""
    if decoder is None:
        return None
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        pattern = replace["pattern"].get("String")
        strip = steps[-1] if kinds[-1] == "Strip" else None
        plain_strip = strip is None or (strip["content"], strip["start"], strip["stop"]) == (
            " ",
            1,
            0,
        )
        if pattern and plain_strip:
            return lambda token: _sentencepiece_bytes(token, pattern, replace["content"])
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable names of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[char] for char in token])
    except KeyError:  # an added token, spelt as it is
        return token.encode()


def _sentencepiece_bytes(token: str, space: str, content: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(space, content).encode()
