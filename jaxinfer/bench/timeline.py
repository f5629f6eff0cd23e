"""What a client saw of one request, and the latencies that follow from it, as vLLM defines them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Timeline:
    """`token_times`: when each piece of the answer came (usually one token each), in seconds of the same clock as
    `start`, when the request was sent. `num_output_tokens` is the server's count. With an `error`, the request failed.
    """

    start: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def end(self) -> float:
        return self.token_times[-1] if self.token_times else self.start

    @property
    def ttft(self) -> float:
        """Time to the first token, in seconds."""
        return self.token_times[0] - self.start

    @property
    def e2el(self) -> float:
        """End-to-end latency: until the last token, in seconds."""
        return self.token_times[-1] - self.start

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: each piece after the one before it, in seconds."""
        times = self.token_times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)


def max_concurrency(timelines: list[Timeline]) -> int:
    """Most requests that were being answered at once. One that ends when another starts doesn't count with it."""
    events = [(t.start, 1) for t in timelines] + [(t.end, -1) for t in timelines]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most
