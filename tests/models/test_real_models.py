"""The packaged models against transformers in float32: logits through the paged path, and what the engine generates
for twenty prompts at once."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch

from jaxinfer import LLM, SamplingParams
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.gguf import GGUFReader
from jaxinfer.weights.loader import load_leaves
from tests.models.paged_harness import PagedRunner

TEXTS = [
    "The",
    "Paris is",
    "Once upon a time, in a small village by the sea,",
    "The quick brown fox jumps over the lazy dog. The five boxing wizards jump quickly.",
    "Water boils at 100 degrees Celsius, which is the same as",
    "My favourite recipe needs flour, butter, two eggs and a pinch of salt. First,",
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    "Q: What is the largest planet of the solar system?\nA:",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer The slings and arrows of "
    "outrageous fortune, Or to take arms against a sea of troubles And by opposing end them. To die: to sleep; No more; "
    "and by a sleep to say we end the heart-ache",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    'import json\n\nwith open("data.json") as file:\n    data = json.load(file)\n\nfor item in data:\n',
    "SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY",
    "<html>\n<head><title>Hello</title></head>\n<body>\n<h1>",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159265358979",
    "2024-01-01, 2024-01-02, 2024-01-03,",
    "你好，世界！今天的天气",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
    "🙂🎉 Happy birthday to you, dear",
    "| Country | Capital |\n|---|---|\n| France | Paris |\n| Japan | Tokyo |\n| Italy |",
]
MAX_PROMPT, NUM_NEW_TOKENS = 60, 64
TIE = 1e-3
"""Logits may differ by this much, so where transformers' best two are no further apart, either is right."""


def prompts_of(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(path)
    prompts = [tokenizer.encode(text)[:MAX_PROMPT] for text in TEXTS]
    assert min(map(len, prompts)) <= 2 and max(map(len, prompts)) == MAX_PROMPT
    return prompts


class Oracle:
    """transformers' own reading of the file and its own cache; all prompts in one batch, padded on the left."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        # transformers reads the file's header several times, which takes 8 s each for a large vocabulary.
        with patch("gguf.GGUFReader", cache(gguf.GGUFReader)):
            self._model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
            ).eval()

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> np.ndarray:
        return self._model(torch.tensor([token_ids])).logits[0].numpy()

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The logits [N, V] after the prompts, then the tokens [N, NUM_NEW_TOKENS] and for each of them how far the
        logit of the second best was below it."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, first, tokens, gaps = None, None, [], []
        while len(tokens) < NUM_NEW_TOKENS:
            out = self._model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = out.past_key_values, out.logits[:, -1]
            first = logits.numpy() if first is None else first
            best = logits.topk(2)
            tokens.append(best.indices[:, 0].numpy())
            gaps.append((best.values[:, 0] - best.values[:, 1]).numpy())
            ids, positions = best.indices[:, :1], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return first, np.stack(tokens, 1), np.stack(gaps, 1)


oracle_of = lru_cache(maxsize=1)(Oracle)


def paged_runner(path: Path, tensor_parallel_size: int) -> PagedRunner:
    reader = GGUFReader(path)
    description = describe_model(reader.config(), max_model_len=64)
    decoder = FunctionalDecoder.create(description.spec, make_mesh(tensor_parallel_size), "float32")
    by_path = load_leaves(reader, description.checkpoint_plan(decoder.dims), decoder.leaves)
    leaves = [by_path[p] for p in decoder.leaves]
    return PagedRunner(decoder, leaves, page_size=16, budget=64, num_rows=len(TEXTS))


@pytest.mark.real
def test_logits_on_two_devices(smollm2_gguf: Path) -> None:
    prompts = prompts_of(smollm2_gguf)[:8]
    _, logits = paged_runner(smollm2_gguf, tensor_parallel_size=2).greedy(prompts, num_new_tokens=4)
    for prompt, of_prompt in zip(prompts, logits, strict=True):
        expected = oracle_of(smollm2_gguf).logits(prompt)
        np.testing.assert_allclose(of_prompt[: len(prompt)], expected, rtol=0, atol=1e-3)


@pytest.mark.real
@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_logits_and_64_greedy_tokens_of_20_prompts(
    model: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    prompts = prompts_of(path)
    expected_logits, expected, gaps = oracle_of(path).greedy(prompts)

    _, logits = paged_runner(path, tensor_parallel_size=1).greedy(prompts, num_new_tokens=1)
    last = np.stack([of_prompt[-1] for of_prompt in logits])
    np.testing.assert_allclose(last, expected_logits, rtol=0, atol=1e-3)

    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with LLM(
        str(path),
        dtype="float32",
        max_model_len=MAX_PROMPT + NUM_NEW_TOKENS,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=256,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = np.array([output.outputs[0].token_ids for output in outputs])
    for i, prompt in enumerate(prompts):
        differ = np.flatnonzero(found[i] != expected[i])
        if differ.size:
            assert gaps[i, differ[0]] < TIE, (TEXTS[i], len(prompt), differ[0])
