from __future__ import annotations

import json
from collections import Counter

import pytest

from jaxinfer.bench.datasets import make_requests
from jaxinfer.bench.options import DatasetArgs
from tests.frontend.story_engine import TOKENIZER


def make(**fields):
    return make_requests(DatasetArgs(**fields), TOKENIZER)


def test_random_lengths_and_tokens():
    requests = make(
        num_prompts=300, random_input_len=40, random_output_len=10, random_range_ratio=0.5
    )
    assert len(requests) == 300
    lengths = [len(r.prompt) for r in requests]
    assert lengths == [r.num_prompt_tokens for r in requests]
    assert (min(lengths), max(lengths)) == (20, 60)
    outputs = [r.max_tokens for r in requests]
    assert (min(outputs), max(outputs)) == (5, 15)
    used = {i for r in requests for i in r.prompt}
    assert not used & set(TOKENIZER.all_special_ids) and max(used) < TOKENIZER.vocab_size
    assert len(used) == TOKENIZER.vocab_size - len(TOKENIZER.all_special_ids)
    assert len({tuple(r.prompt) for r in requests}) == 300


def test_without_a_range_all_lengths_are_equal_and_a_prefix_is_common():
    requests = make(
        num_prompts=5, random_input_len=7, random_output_len=3, random_prefix_len=6, seed=2
    )
    assert {(r.num_prompt_tokens, r.max_tokens) for r in requests} == {(13, 3)}
    assert len({tuple(r.prompt[:6]) for r in requests}) == 1
    assert len({tuple(r.prompt[6:]) for r in requests}) == 5


def test_the_seed_decides():
    fields = dict(num_prompts=4, random_input_len=9, random_range_ratio=0.3)
    assert make(seed=1, **fields) == make(seed=1, **fields) != make(seed=2, **fields)


def test_texts_have_the_tokens_that_are_counted():
    for request in make(num_prompts=20, random_input_len=30, as_text=True):
        assert isinstance(request.prompt, str)
        ids = TOKENIZER.encode(request.prompt, add_special_tokens=False)
        assert len(ids) == request.num_prompt_tokens
        assert abs(len(ids) - 30) <= 3


def test_each_prefix_is_repeated_equally_often():
    requests = make(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=5,
        prefix_repetition_output_len=3,
    )
    assert {(len(r.prompt), r.max_tokens) for r in requests} == {(13, 3)}
    starts = Counter(tuple(r.prompt[:8]) for r in requests)
    assert sorted(starts.values()) == [3, 3, 3, 3]
    assert len({tuple(r.prompt) for r in requests}) == 12


def conversation(*texts):
    return {"conversations": [{"from": "someone", "value": text} for text in texts]}


def test_sharegpt_takes_first_turns_of_usable_length(tmp_path):
    path = tmp_path / "sharegpt.json"
    entries = [
        conversation("once upon", "a time there", "was"),
        conversation("a", "too short a prompt"),
        conversation("too short an answer", "a"),
        conversation("x" * 1025, "too long a prompt"),
        conversation("alone"),
        conversation("the fox", "y" * 2042),
        conversation("it was", "quick enough"),
    ]
    path.write_text(json.dumps(entries))
    fields = dict(dataset_name="sharegpt", dataset_path=str(path))
    found = make(num_prompts=2, **fields)
    assert {(r.prompt, r.max_tokens) for r in found} == {("once upon", 12), ("it was", 12)}
    assert make(num_prompts=5, **fields) == [*found, *found, found[0]]
    given = make(num_prompts=6, sharegpt_output_len=2, **fields)
    assert {r.max_tokens for r in given} == {2}
    assert {r.prompt for r in given} == {"once upon", "it was", "too short an answer", "the fox"}


def test_custom_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "once"}\n\n{"prompt": "upon a", "output_tokens": 3}\n')
    found = make(dataset_name="custom", dataset_path=str(path), num_prompts=3, custom_output_len=9)
    assert [(r.prompt, r.num_prompt_tokens, r.max_tokens) for r in found] == [
        ("once", 4, 9),
        ("upon a", 6, 3),
        ("once", 4, 9),
    ]


@pytest.mark.parametrize(
    ("fields", "text", "message"),
    [
        (dict(dataset_name="other"), None, "dataset_name must be one of"),
        (dict(dataset_name="custom"), None, "dataset_path must be a file"),
        (dict(dataset_path="x"), None, "dataset_path must be a file"),
        (dict(dataset_name="custom", dataset_path="nowhere"), None, "there is no file nowhere"),
        (dict(num_prompts=0), None, "num_prompts must be at least 1"),
        (dict(random_range_ratio=1.0), None, "random_range_ratio must be in"),
        (dict(dataset_name="custom"), "", "holds no prompt"),
        (dict(dataset_name="custom"), '{"prompt": "a"}\n[1]', "line 2"),
        (dict(dataset_name="custom"), '{"text": "a"}', "line 1"),
        (dict(dataset_name="sharegpt"), "[", "is not JSON"),
        (dict(dataset_name="sharegpt"), "{}", "is not a list"),
        (dict(dataset_name="sharegpt"), '[{"conversations": [{}, {}]}]', "entry 0"),
    ],
)
def test_datasets_that_can_not_be(fields, text, message, tmp_path):
    if text is not None:
        path = tmp_path / "data"
        path.write_text(text)
        fields = fields | {"dataset_path": str(path)}
    with pytest.raises(ValueError, match=message):
        make(**fields)
