from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.frontend.reasoning_parsers import reasoning_parsers

MARKS = ["<think>", "</think>", "<", "</thi", "think>", " ", "\n", "so", "{}", "é"]
wild = st.lists(st.sampled_from(MARKS), max_size=10).map("".join)
states = st.sampled_from([None, True, False])


def parsed(name: str, thinks: bool | None, pieces: list[str]) -> tuple[str, str]:
    parser = reasoning_parsers.get(name)(thinks)
    found = [*map(parser.feed, pieces), parser.finish()]
    for early, late in itertools.pairwise(found):
        assert not (early.content and late.reasoning), "thoughts come first"
    return "".join(f.reasoning for f in found), "".join(f.content for f in found)


@pytest.mark.parametrize("name", reasoning_parsers.names)
@settings(max_examples=200, deadline=None)
@given(text=wild, thinks=states, cuts=st.lists(st.integers(0, 99), max_size=6))
def test_no_text_reads_differently_in_pieces(
    name: str, text: str, thinks: bool | None, cuts: list[int]
):
    whole = parsed(name, thinks, [text])
    assert parsed(name, thinks, list(text)) == whole
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert parsed(name, thinks, [text[a:b] for a, b in itertools.pairwise(places)]) == whole


THOUGHTS = "Hm, 1 < 2.\n\nSo </ it is"
ANSWER = "Yes: <think> is a tag.\n"


@pytest.mark.parametrize(
    ("name", "thinks", "text", "expected"),
    [
        ("deepseek_r1", True, f"{THOUGHTS}\n</think>\n\n{ANSWER}", (THOUGHTS, ANSWER)),
        ("deepseek_r1", True, f"<think>\n{THOUGHTS}</think>{ANSWER}", (THOUGHTS, ANSWER)),
        ("deepseek_r1", True, THOUGHTS + "</th", (THOUGHTS + "</th", "")),
        ("deepseek_r1", False, ANSWER, ("", ANSWER)),
        ("qwen3", None, f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}", (THOUGHTS, ANSWER)),
        ("qwen3", None, f" \n{ANSWER}", ("", f" \n{ANSWER}")),
        ("qwen3", None, "<thi", ("", "<thi")),
        ("qwen3", None, "<think> \n </think> 3", ("", "3")),
        ("qwen3", True, f"{THOUGHTS}</think>{ANSWER}", (THOUGHTS, ANSWER)),
        ("qwen3", False, f"<think>{ANSWER}", ("", f"<think>{ANSWER}")),
    ],
)
def test_thoughts_and_answers(name: str, thinks: bool | None, text: str, expected: tuple[str, str]):
    assert parsed(name, thinks, [text]) == expected


def test_what_a_prompt_says_of_the_output():
    r1, qwen3 = map(reasoning_parsers.get, ("deepseek_r1", "qwen3"))
    for prompt, of_r1, of_qwen3 in (
        ("<|assistant|>", True, None),
        ("<|assistant|><think>\n", True, True),
        ("<|assistant|><think>\n\n</think>\n\n", False, False),
        ("<think>old</think>answer<|user|>more<|assistant|>\n", True, None),
    ):
        assert (r1.after_prompt(prompt), qwen3.after_prompt(prompt)) == (of_r1, of_qwen3), prompt
    for begun, expected in (("<think>I", True), ("<think>I</think>", False), ("So", False)):
        assert qwen3.after_prompt("x" + begun, begun) is expected
