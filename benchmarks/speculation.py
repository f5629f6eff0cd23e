"""What speculation saves a single request that copies: output tokens per second with it and without, interleaved.

    python benchmarks/speculation.py MODEL [--num-speculative-tokens 7] [--rounds 5] [--dtype float32]

The prompt is a passage of 300 tokens, twice; the model goes on with it. Both engines live in one process and take
turns. The run fails when their tokens differ in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

from machine import CoreMeter, describe_machine, versions

from jaxinfer import LLM, RequestOutput, SamplingParams

PASSAGE_TOKENS = 300
PASSAGE = """
The lighthouse at Kettle Point was built in 1871 by a mason called Aldous Wren, who had never seen the sea before he came
to work on it. He measured the rock with a knotted rope, wrote the numbers on the back of a hymn sheet, and began to lay
granite in rings of forty blocks. Each block was cut so that it locked into its neighbours, and no two rings were the same.
In the third winter a storm took the scaffold, two boats and the cook's goat; the tower stayed where it was. Wren moved
into the lamp room, which had no lamp yet, and slept among coils of wire. When the light was lit at last, on the ninth of
October, the fishermen of the bay agreed that it was too bright, too high and much too expensive, and within a year none of
them could imagine coming home without it. The keeper's log for that autumn lists seventeen ships, one whale, and a visit
by the bishop, who climbed the stairs, looked out over the water for a long while, and asked whether the soup was ready.
Wren stayed on as the second keeper. He planted potatoes behind the oil store, taught the children of the village to read
with a book of knots, and painted the door a different colour every spring. After his death the door was found to have
fifty-two coats of paint, the first of them a green that nobody could name.
"""


def generate(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[float, RequestOutput]:
    """Output tokens per second, and the output."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return max_tokens / (time.perf_counter() - start), output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--speculative-config", type=json.loads, help="instead of n-grams")
    parser.add_argument("--max-tokens", type=int, default=PASSAGE_TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = args.speculative_config or {
        "method": "ngram",
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    engines = {
        name: LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=2 * PASSAGE_TOKENS + args.max_tokens + 8,
            max_num_seqs=4,
            speculative_config=config if name == "speculative" else None,
        )
        for name in ("plain", "speculative")
    }
    passage = engines["plain"].get_tokenizer().encode(PASSAGE.strip() + "\n")[:PASSAGE_TOKENS]
    if len(passage) < PASSAGE_TOKENS:
        sys.exit(f"This tokenizer makes only {len(passage)} tokens of the passage.")
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, RequestOutput] = {}
    others = []
    for turn in range(args.rounds + 1):
        for name in sorted(engines, reverse=turn % 2 == 1):
            with CoreMeter(os.getpid()) as meter:
                speed, outputs[name] = generate(engines[name], passage * 2, args.max_tokens)
            if turn:  # the first round compiles
                speeds[name].append(speed)
                others.append(meter.other)
    tokens = {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}
    metrics = outputs["speculative"].metrics
    assert metrics is not None
    ratios = [b / a for a, b in zip(speeds["plain"], speeds["speculative"], strict=True)]
    print(f"{describe_machine()}, {versions('jax')}, {engines['plain'].config.model.dtype}")
    print(
        f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted; "
        f"equal tokens: {tokens['plain'] == tokens['speculative']}; "
        f"other processes used {statistics.fmean(others):.2f} cores"
    )
    plain, fast = (statistics.median(speeds[name]) for name in engines)
    print(
        f"plain {plain:.1f} tokens/s, speculative {fast:.1f} tokens/s, "
        f"ratio {statistics.median(ratios):.2f} (rounds: {', '.join(f'{r:.2f}' for r in ratios)})"
    )
    if "32" in engines["plain"].config.model.dtype:
        sys.exit(tokens["plain"] != tokens["speculative"])


if __name__ == "__main__":
    main()
