"""Logprobs in the two styles of the OpenAI API, completions' and chat's, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.frontend.token_text import TokenText
from jaxinfer.outputs import Logprob, PositionLogprobs

_LOWEST = -9999.0
"""JSON knows no -inf."""


@dataclass(frozen=True, slots=True)
class LogprobFormatter:
    """`as_ids`: tokens are named "token_id:N", which is never ambiguous. `only`: the tokens to report, where the client
    has said so, instead of the best."""

    token_text: TokenText
    as_ids: bool = False
    only: Sequence[int] | None = None

    def completion(
        self,
        positions: Sequence[PositionLogprobs | None],
        token_ids: Sequence[int],
        num_top: int,
        offset: int = 0,
    ) -> dict[str, Any]:
        """Columns by token; a position of None (a prompt's first token) has no logprob. `offset` is where the first
        token's text begins."""
        result: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for position, token_id in zip(positions, token_ids, strict=True):
            chosen = None if position is None else position[token_id]
            result["text_offset"].append(offset)
            result["tokens"].append(self._name(token_id, chosen))
            result["token_logprobs"].append(None if chosen is None else _number(chosen))
            result["top_logprobs"].append(
                None if position is None else self._top_by_name(position, token_id, num_top)
            )
            offset += len(self._text(token_id, chosen))
        return result

    def chat(
        self, positions: Sequence[PositionLogprobs], token_ids: Sequence[int], num_top: int
    ) -> dict[str, Any]:
        return {
            "content": [
                self._entry(token_id, position[token_id])
                | {
                    "top_logprobs": [
                        self._entry(other, logprob)
                        for other, logprob in self._best(position, num_top)
                    ]
                }
                for position, token_id in zip(positions, token_ids, strict=True)
            ]
        }

    def prompt(
        self, positions: Sequence[PositionLogprobs | None]
    ) -> list[dict[int, dict[str, Any]] | None]:
        return [
            None
            if position is None
            else {
                token_id: {
                    "logprob": _number(logprob),
                    "rank": logprob.rank,
                    "decoded_token": logprob.decoded_token,
                }
                for token_id, logprob in position.items()
            }
            for position in positions
        ]

    def _top_by_name(
        self, position: PositionLogprobs, token_id: int, num_top: int
    ) -> dict[str, float]:
        """The sampled token is among them, be it likely or not."""
        top = {self._name(other, lp): _number(lp) for other, lp in self._best(position, num_top)}
        chosen = position[token_id]
        return {self._name(token_id, chosen): _number(chosen)} | top

    def _best(self, position: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
        if self.only:
            # An echoed prompt's positions needn't hold them.
            return list({i: position[i] for i in self.only if i in position}.items())
        ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
        return ranked[:num_top]

    def _entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": self._name(token_id, logprob),
            "logprob": _number(logprob),
            "bytes": list(self.token_text.token_bytes(token_id)),
        }

    def _name(self, token_id: int, logprob: Logprob | None) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self._text(token_id, logprob) or _spelt(self.token_text.token_bytes(token_id))

    def _text(self, token_id: int, logprob: Logprob | None) -> str:
        if logprob is None:
            return self.token_text.token_bytes(token_id).decode("utf-8", "replace")
        return logprob.decoded_token or ""


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, _LOWEST)


def _spelt(data: bytes) -> str:
    """A token that is only part of a character, as OpenAI names it."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data else ""
