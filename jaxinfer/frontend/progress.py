"""The progress bar of a batch, with tokens per second read and written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class BatchProgress:
    """One tick per finished prompt. `use_tqdm` may be a class or function to be used in place of `tqdm`."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        if use_tqdm:
            if use_tqdm is True:
                from tqdm.auto import tqdm

                use_tqdm = tqdm
            self._bar = use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._start = time.monotonic()
        self._num_read = 0
        self._num_written = 0

    def add_written(self, num_tokens: int) -> None:
        self._num_written += num_tokens

    def finish_prompt(self, num_prompt_tokens: int) -> None:
        if self._bar is None:
            return
        self._num_read += num_prompt_tokens
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_read / seconds:.1f} toks/s, "
            f"output: {self._num_written / seconds:.1f} toks/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
