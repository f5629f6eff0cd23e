"""lm-eval's numbers are those that transformers' logits give; only where an lm-eval is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.live_server import live_server
from tests.clients.snippets import ADDRESS, interpreter, run, snippets
from tests.server.server_process import server_process
from tests.tiny_llm import ids, oracle_logits, tiny_llm_dir


def evaluate(task: str, prefix: str, url: str, directory: Path) -> list[dict[str, Any]]:
    """The logged samples, by document."""
    python = interpreter("lm_eval")
    for name, kind in ((f"{task}.yaml", "task"), (f"{task}.jsonl", "data")):
        (directory / name).write_text(snippets()[f"{prefix}-{kind}"][1])
    command = snippets()[prefix][1].replace(ADDRESS, url)
    more = {"PATH": f"{Path(python).parent}:/usr/bin:/bin", "OPENAI_API_KEY": "none"}
    printed = run(["bash", "-c", command], directory, more | {"HF_HUB_OFFLINE": "1"})
    assert re.search(rf"^\| *{task} *\|", printed, re.MULTILINE), printed
    [path] = directory.glob(f"results/**/samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def log_likelihood(context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation, and whether it is what greedy sampling gives."""
    start, tokens = len(ids(context)), ids(context + continuation)
    logits = oracle_logits(tokens)[start - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    given = tokens[start:]
    value = logprobs[np.arange(len(given)), given].sum()
    return float(value), logits.argmax(-1).tolist() == given


def test_likelihoods(tmp_path: Path):
    interpreter("lm_eval")
    flags = (
        "--port 0 --served-model-name smollm2-135m --enable-tokenizer-info-endpoint --warmup lazy"
    )
    with server_process(["-m", "jaxinfer", "serve", str(tiny_llm_dir()), *flags.split()]) as server:
        samples = evaluate("rivers", "lm-eval", server.url, tmp_path)
    assert len(samples) == 2
    for sample in samples:
        doc = sample["doc"]
        found = [(float(value), str(greedy)) for [value, greedy] in sample["filtered_resps"]]
        for choice, (value, greedy) in zip(doc["choices"], found, strict=True):
            expected, is_greedy = log_likelihood(doc["question"], f" {choice}")
            assert value == pytest.approx(expected, abs=1e-3) and greedy == str(is_greedy)
        best = max(range(2), key=lambda i: found[i][0])
        assert sample["acc"] == (best == doc["answer"])


def test_answers(tmp_path: Path):
    def capital(prompt: str) -> str:
        return "Rome\nis it." if "Italy" in prompt else "Lisbon"

    with live_server(capital, dict(served_model_name=("smollm2-135m",))) as url:
        samples = evaluate("capitals", "lm-eval-chat", url, tmp_path)
    assert [sample["filtered_resps"] for sample in samples] == [["Rome"], ["Lisbon"]]
    assert [sample["exact_match"] for sample in samples] == [1, 0]
