"""Embeddings of sentences of mixed lengths, beside sentence-transformers on the same machine.

Each engine has a process of its own and as many threads; rounds alternate, so that what else the machine does falls on
both. Needs sentence-transformers (`pip install sentence-transformers`), here or in the environment of `--peer-python`:

    python benchmarks/embeddings.py --rounds 7
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PEER = "sentence-transformers"
OURS = "jaxinfer"


def sentences(vocabulary: Path, count: int, seed: int = 0) -> list[str]:
    """Of words of the model's own vocabulary; as many words as sentences and paragraphs of a corpus have (log-normal, a median
    of 18), at most 180."""
    words = [w for w in vocabulary.read_text(encoding="utf-8").split() if w.isalpha()][2000:]
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.9, 0.8, count), 1, 180).astype(int)
    return [" ".join(rng.choice(words, n)) for n in lengths]


def work(engine: str, model: str, count: int, dtype: str, out: Path) -> None:
    """A process: reads lines, embeds once for each, and answers with the wall and the CPU seconds that it took."""
    from jaxinfer.weights.packaged import packaged_directory

    directory = packaged_directory(model)
    texts = sentences(directory / "vocab.txt", count)
    if engine == PEER:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        peer = SentenceTransformer(str(directory), device="cpu")

        def embed() -> np.ndarray:
            return peer.encode(texts, batch_size=32, show_progress_bar=False)
    else:
        from jaxinfer import LLM

        llm = LLM(model, dtype=dtype)

        def embed() -> np.ndarray:
            outputs = llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)
            return np.array([output.outputs.embedding for output in outputs], np.float32)

    np.save(out, embed())
    print("ready", flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        embed()
        seconds = [time.perf_counter() - wall, time.process_time() - cpu]
        print(json.dumps(seconds), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        files = {engine: Path(scratch) / f"{engine}.npy" for engine in (OURS, PEER)}
        pythons = {OURS: sys.executable, PEER: args.peer_python}
        workers = {
            engine: subprocess.Popen(
                [
                    *(pythons[engine], __file__, "--worker", engine, "--out", str(files[engine])),
                    *("--model", args.model, "--count", str(args.count), "--dtype", args.dtype),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"},
            )
            for engine in files
        }
        try:
            for engine, worker in workers.items():
                if worker.stdout.readline() != "ready\n":
                    raise SystemExit(f"{engine} can't start.")
            rounds: dict[str, list[list[float]]] = {engine: [] for engine in files}
            for _ in range(args.rounds):
                for engine, worker in workers.items():
                    worker.stdin.write("\n")
                    worker.stdin.flush()
                    rounds[engine].append(json.loads(worker.stdout.readline()))
        finally:
            for worker in workers.values():
                worker.stdin.close()
                worker.wait()
        ours, peers = np.load(files[OURS]), np.load(files[PEER])
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(peers, axis=1)
    cosines = (ours * peers).sum(1) / lengths
    return {"rounds": rounds, "cosine_min": float(cosines.min()), "load": os.getloadavg()[0]}


def report(result: dict[str, Any], count: int) -> str:
    lines = [f"{'':24}{'sentences/s':>12}{'best':>8}{'worst':>8}{'CPU s / s':>11}"]
    for engine, rounds in result["rounds"].items():
        rates = sorted(count / wall for wall, _ in rounds)
        busy = statistics.median(cpu / wall for wall, cpu in rounds)
        median = statistics.median(rates)
        lines.append(f"{engine:24}{median:12.1f}{rates[-1]:8.1f}{rates[0]:8.1f}{busy:11.2f}")
    pairs = zip(result["rounds"][OURS], result["rounds"][PEER], strict=True)
    ratios = sorted(theirs[0] / mine[0] for mine, theirs in pairs)
    by_cpu = [theirs[1] / mine[1] for mine, theirs in zip(*result["rounds"].values(), strict=True)]
    lines += [
        f"{OURS} is {statistics.median(ratios):.2f} times as fast, by rounds {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        f"it takes {statistics.median(by_cpu):.2f} times less CPU time.",
        f"Least cosine of {count} sentences: {result['cosine_min']:.6f}. Load of the machine at the end: {result['load']:.1f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="all-minilm-l6-v2", help="alias of a packaged model")
    parser.add_argument("--count", type=int, default=200, help="sentences")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto", help="of jaxinfer")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--worker", choices=(OURS, PEER), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.model, args.count, args.dtype, args.out)
    else:
        print(report(measure(args), args.count))


if __name__ == "__main__":
    main()
