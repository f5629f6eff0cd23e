"""What grammars cost a batch: output tokens per second with a JSON schema on every request and with none, interleaved.

    python benchmarks/structured_outputs.py MODEL [--batch 32] [--max-tokens 64] [--rounds 5]

One engine serves both in turns, at temperature 1. Every request has a schema of its own, which no output completes
within its tokens, so both sides generate the same number. Grammars are compiled in the first round, which isn't timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from machine import CoreMeter, describe_machine, versions

from jaxinfer import LLM, SamplingParams, StructuredOutputsParams

PROMPT = "Write a list of people, their ages, towns and hobbies, as JSON.\n"


def schema(index: int) -> dict[str, Any]:
    """An array of more people than fit; `index` makes it one that no other request has."""
    person = {
        "type": "object",
        "properties": {
            f"name_{index}": {"type": "string", "minLength": 3, "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "town": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
            "hobby": {"enum": ["chess", "rowing", "gardening", "astronomy"]},
        },
        "required": [f"name_{index}", "age", "town", "hobby"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-jump-ahead", action="store_true")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        max_model_len=256 + args.max_tokens,
        max_num_seqs=args.batch,
        grammar_jump_ahead=not args.no_jump_ahead,
    )
    common = dict(temperature=1.0, max_tokens=args.max_tokens, ignore_eos=True)
    guides = [StructuredOutputsParams(json=schema(i)) for i in range(args.batch)]
    speeds: dict[str, list[float]] = {"unguided": [], "guided": []}
    others = []
    for turn in range(args.rounds + 1):
        for name in sorted(speeds, reverse=turn % 2 == 1):
            params = [
                SamplingParams(
                    seed=100 * turn + i,
                    structured_outputs=guide if name == "guided" else None,
                    **common,
                )
                for i, guide in enumerate(guides)
            ]
            llm.reset_prefix_cache()
            with CoreMeter(os.getpid()) as meter:
                start = time.perf_counter()
                outputs = llm.generate([PROMPT] * args.batch, params, use_tqdm=False)
                seconds = time.perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == args.batch * args.max_tokens, num_tokens
            if turn:  # the first round compiles programs and grammars
                speeds[name].append(num_tokens / seconds)
                others.append(meter.other)
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    print(f"{describe_machine()}, {versions('jax')}, {llm.config.model.dtype}")
    print(f"other processes used {statistics.fmean(others):.2f} cores")
    print(
        ", ".join(f"{name} {statistics.median(s):.1f} tokens/s" for name, s in speeds.items())
        + f", ratio {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})"
    )


if __name__ == "__main__":
    main()
