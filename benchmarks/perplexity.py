"""Perplexity of models on a text, through the engine: what quantization costs.

    python benchmarks/perplexity.py MODEL [MODEL ...] [--text FILE] [--window 512] [--stride 256] [--max-tokens N]

The text is read in windows that overlap: of each, the last `stride` tokens are scored, so that all but the first ones are
predicted from at least `window - stride` tokens before them. Where a tokenizer begins texts with a special token, each
window begins with it. Printed is exp(mean negative log-likelihood per token); the second and later models are compared with
the first, which has to have the same tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer import LLM, SamplingParams

TEXT = Path(__file__).parent / "data" / "moby_dick.txt"


class Window(NamedTuple):
    """Tokens [start, end) of a text, of which those from `scored` on count."""

    start: int
    scored: int
    end: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Each token counts in exactly one window. Raises `ValueError` unless 1 <= stride <= window."""
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and window ({window}), got {stride}.")
    # The first window is whole: nothing before it could give its tokens more context.
    scored, end = 0, min(window, num_tokens)
    while scored < num_tokens:
        yield Window(max(0, end - window), scored, end)
        scored, end = end, min(end + stride, num_tokens)


def token_nlls(llm: LLM, ids: Sequence[int], window: int, stride: int) -> list[float]:
    """Negative log-likelihoods in nats, one for each token that has something before it."""
    prefix = llm.get_tokenizer().encode("")
    parts = list(windows(len(ids), window, stride))
    prompts = [{"prompt_token_ids": [*prefix, *ids[part.start : part.end]]} for part in parts]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    nlls = []
    for part, output in zip(parts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        first = len(prefix) + part.scored - part.start
        entries = list(output.prompt_logprobs or [])[first:]
        tokens = output.prompt_token_ids[first:]
        pairs = zip(tokens, entries, strict=True)
        nlls += [-entry[token].logprob for token, entry in pairs if entry is not None]
    return nlls


def perplexity(nlls: Sequence[float]) -> float:
    return math.exp(math.fsum(nlls) / len(nlls))


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    # One more than the window for a special token before it, one for the token that is generated.
    with LLM(model, dtype=args.dtype, max_model_len=args.window + 2, warmup="lazy") as llm:
        ids = llm.get_tokenizer().encode(args.text.read_text("utf-8"), add_special_tokens=False)
        ids = ids[: args.max_tokens]
        nlls = token_nlls(llm, ids, args.window, args.stride)
    return {"model": model, "tokens": len(nlls), "perplexity": perplexity(nlls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, help="of the text's beginning (default: all)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object per model and line")
    args = parser.parse_args()
    first = None
    for model in args.models:
        found = measure(model, args)
        first = first or found
        if found["tokens"] != first["tokens"]:
            raise SystemExit(f"{model} has another tokenizer than {first['model']}.")
        if args.json:
            print(json.dumps(found), flush=True)
            continue
        change = 100 * (found["perplexity"] / first["perplexity"] - 1)
        beside = "" if found is first else f"  {change:+.2f} %"
        print(f"{found['perplexity']:9.3f}{beside}  {found['tokens']} tokens  {model}", flush=True)


if __name__ == "__main__":
    main()
