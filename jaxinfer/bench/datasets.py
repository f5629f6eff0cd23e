"""What a benchmark asks for: prompts and output lengths, made up from a seed or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.bench.options import DatasetArgs

if TYPE_CHECKING:
    from jaxinfer.frontend.tokenizer import Tokenizer

_SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL, _SHAREGPT_MIN = 1024, 2048, 4
"""Tokens: what vLLM keeps of ShareGPT, so that figures compare."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """`prompt` is text or token ids; `num_prompt_tokens` doesn't count what a chat template adds."""

    prompt: str | list[int]
    num_prompt_tokens: int
    max_tokens: int


def make_requests(args: DatasetArgs, tokenizer: Tokenizer) -> list[BenchRequest]:
    """`num_prompts` requests, the same for the same arguments. Raises `ValueError` for a file that can't be used."""
    makers: dict[str, Callable[[DatasetArgs, Tokenizer, np.random.Generator], list[BenchRequest]]]
    makers = {
        "random": _random,
        "prefix_repetition": _prefix_repetition,
        "sharegpt": _sharegpt,
        "custom": _custom,
    }
    return makers[args.dataset_name](args, tokenizer, np.random.default_rng(args.seed))


class _TokenSource:
    """Ids of ordinary tokens: none with a role of its own."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {*tokenizer.all_special_ids, *added}
        self._ids = np.array(sorted(set(tokenizer.get_vocab().values()) - special))
        self._tokenizer = tokenizer
        self._rng = rng

    def take(self, count: int) -> list[int]:
        return self._rng.choice(self._ids, size=count).tolist()

    def request(self, ids: list[int], max_tokens: int, as_text: bool) -> BenchRequest:
        if not as_text:
            return BenchRequest(ids, len(ids), max_tokens)
        text, count = self._text(ids)
        return BenchRequest(text, count, max_tokens)

    def _text(self, ids: list[int]) -> tuple[str, int]:
        """A text of about `ids`, and its exact number of tokens: texts of random tokens are tokenized otherwise."""
        wanted, tokenizer = len(ids), self._tokenizer
        for _ in range(8):
            text = tokenizer.decode(ids)
            found = tokenizer.encode(text, add_special_tokens=False)
            if len(found) == wanted:
                break
            ids = found[:wanted] + self.take(max(wanted - len(found), 0))
        return text, len(found)


def _random(
    args: DatasetArgs, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    source = _TokenSource(tokenizer, rng)
    prefix = source.take(args.random_prefix_len)

    def lengths(middle: int) -> list[int]:
        low = int(np.floor(middle * (1 - args.random_range_ratio)))
        high = int(np.ceil(middle * (1 + args.random_range_ratio)))
        return rng.integers(max(low, 1), high, size=args.num_prompts, endpoint=True).tolist()

    return [
        source.request(prefix + source.take(num_prompt), num_output, args.as_text)
        for num_prompt, num_output in zip(
            lengths(args.random_input_len), lengths(args.random_output_len), strict=True
        )
    ]


def _prefix_repetition(
    args: DatasetArgs, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    """Each prefix equally often, within one, in random order."""
    source = _TokenSource(tokenizer, rng)
    count = args.prefix_repetition_num_prefixes
    prefixes = [source.take(args.prefix_repetition_prefix_len) for _ in range(count)]
    return [
        source.request(
            prefixes[i % count] + source.take(args.prefix_repetition_suffix_len),
            args.prefix_repetition_output_len,
            args.as_text,
        )
        for i in rng.permutation(args.num_prompts).tolist()
    ]


def _sharegpt(
    args: DatasetArgs, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    """Each conversation's first two turns: a prompt, and an answer whose length is asked for. Short and long ones are
    left out; they start again when there are too few."""
    data = _read_json(args)
    if not isinstance(data, list):
        raise ValueError(f"dataset_path: {args.dataset_path} is not a list of conversations.")
    usable = _conversations(args, tokenizer, rng.permutation(len(data)), data)
    return _repeated(args, list(islice(usable, args.num_prompts)))


def _conversations(
    args: DatasetArgs, tokenizer: Tokenizer, order: np.ndarray, data: list[Any]
) -> Iterator[BenchRequest]:
    for i in order.tolist():
        turns = data[i].get("conversations") if isinstance(data[i], dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        try:
            prompt, answer = (turn["value"] for turn in turns[:2])
            num_prompt, num_answer = (
                len(tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, answer)
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f'dataset_path: turn of entry {i} of {args.dataset_path} has no "value".'
            ) from error
        num_output = args.sharegpt_output_len or num_answer
        too_short = num_prompt < _SHAREGPT_MIN or (
            args.sharegpt_output_len is None and num_output < _SHAREGPT_MIN
        )
        too_long = (
            num_prompt > _SHAREGPT_MAX_PROMPT or num_prompt + num_output > _SHAREGPT_MAX_TOTAL
        )
        if not (too_short or too_long):
            yield BenchRequest(prompt, num_prompt, num_output)


def _custom(
    args: DatasetArgs, tokenizer: Tokenizer, rng: np.random.Generator
) -> list[BenchRequest]:
    """A JSON object per line: "prompt", and "output_tokens" where it isn't the flag's. In the file's order."""
    requests = []
    for number, line in enumerate(_read(args).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
            count = len(tokenizer.encode(prompt, add_special_tokens=False))
            limit = int(entry.get("output_tokens") or args.custom_output_len)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'dataset_path: line {number} of {args.dataset_path} is no JSON object with a "prompt".'
            ) from error
        requests.append(BenchRequest(prompt, count, limit))
    return _repeated(args, requests)


def _repeated(args: DatasetArgs, requests: list[BenchRequest]) -> list[BenchRequest]:
    if not requests:
        raise ValueError(f"dataset_path: {args.dataset_path} holds no prompt that can be used.")
    return list(islice(cycle(requests), args.num_prompts))


def _read(args: DatasetArgs) -> str:
    path = Path(args.dataset_path or "").expanduser()
    if not path.is_file():
        raise ValueError(f"dataset_path: there is no file {path}.")
    return path.read_text(encoding="utf-8")


def _read_json(args: DatasetArgs) -> Any:
    try:
        return json.loads(_read(args))
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise ValueError(f"dataset_path: {args.dataset_path} is not JSON: {error}.") from error
        raise
