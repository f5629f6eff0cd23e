"""Samples at temperature 1 follow their grammars, judged by `jsonschema`, `re` and Python's parser: of SmolLM2, and of
a random model with its tokenizer, which has no idea of JSON and takes every turn that a mask leaves open."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxinfer import LLM, SamplingParams, StructuredOutputsParams
from tests.noise_checkpoint import noise_checkpoint

SAMPLES = int(os.environ.get("STRUCTURED_SAMPLES", "3"))
"""Of each case with SmolLM2."""
NOISE_SAMPLES = max(SAMPLES, 64)
"""Of each case with the random model. `STRUCTURED_SAMPLES=200` draws 200 with both."""
MAX_TOKENS = 300

pytestmark = pytest.mark.real


def closed(**properties: Any) -> dict[str, Any]:
    return dict(
        type="object",
        properties=properties,
        required=sorted(properties),
        additionalProperties=False,
    )


WORD = {"type": "string", "pattern": "^[A-Za-z]+$", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": closed(
        person=closed(
            name=WORD,
            address=closed(street=WORD, number={"type": "integer", "minimum": 1, "maximum": 99}),
        ),
        scores={
            "type": "array",
            "items": {"type": "integer", "minimum": -5, "maximum": 250},
            "minItems": 2,
            "maxItems": 4,
        },
    ),
    "chinese_enum": closed(city={"enum": ["北京", "上海市", "广州"]}, known={"type": "boolean"}),
    "bounds": closed(low={"type": "integer", "minimum": 17, "maximum": 1203}, code=WORD),
    "any_of": closed(
        value={
            "anyOf": [
                {"type": "null"},
                WORD,
                closed(x={"type": "integer", "minimum": 0, "maximum": 9}),
            ]
        }
    ),
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed(
                value={"type": "integer", "minimum": 0, "maximum": 99},
                next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            )
        },
    },
}
SUM = r"""
start: term (("+" | "-" | "*") term){0,5}
term: NUMBER | "(" NUMBER ("+" | "-") NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


def valid_json(schema: dict[str, Any]) -> Callable[[str], None]:
    def check(text: str) -> None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert re.search(r"\s{34}", text) is None, "whitespace without an end"

    return check


def valid_sum(text: str) -> None:
    assert re.fullmatch(r"[0-9+*()-]+", text) and ast.parse(text, mode="eval")


def matching(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return check


CASES: dict[str, tuple[StructuredOutputsParams, Callable[[str], None]]] = {
    **{name: (StructuredOutputsParams(json=s), valid_json(s)) for name, s in SCHEMAS.items()},
    **{
        pattern: (StructuredOutputsParams(regex=pattern), matching(pattern))
        for pattern in (r"^(|yes|no)$", r"(|[a-c]{1,9})-(x|)", r"\d{3}-\d{2,4}")
    },
    "sum": (StructuredOutputsParams(grammar=SUM), valid_sum),
    "choice": (StructuredOutputsParams(choice=["naïve", "是", "no"]), matching("naïve|是|no")),
}


PROMPTS = {
    "recursive": '{"value": 4, "next": null}\n{"value": 71, "next": {"value": 6, "next": null}}\n'
}
PENALTIES = {"recursive": 0.5}
"""On tokens by how often they came: SmolLM2 repeats itself, and would nest its nodes as deep as there is room."""


def sampling(params: StructuredOutputsParams, **more: Any) -> SamplingParams:
    fields = dict(temperature=1.0, max_tokens=MAX_TOKENS, structured_outputs=params) | more
    return SamplingParams(**fields)


def draw(llm: LLM, names: Sequence[str], count: int) -> dict[str, list[str]]:
    """`count` samples of each case, all of them in one run."""
    prompts = [PROMPTS.get(name, "Somebody, with a city and some numbers:\n") for name in names]
    params = [
        sampling(CASES[name][0], n=count, seed=i, frequency_penalty=PENALTIES.get(name, 0.0))
        for i, name in enumerate(names)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {c.finish_reason for output in outputs for c in output.outputs} == {"stop"}
    return {
        name: [completion.text for completion in output.outputs]
        for name, output in zip(names, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2_gguf), max_model_len=512, max_num_seqs=8, max_num_batched_tokens=32
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_checkpoint(smollm2_gguf: Path) -> Iterator[str]:
    with noise_checkpoint(smollm2_gguf, 512) as directory:
        yield directory


RANDOM = dict(dtype="float32", max_model_len=512, max_num_seqs=32, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def random_model(random_checkpoint: str) -> Iterator[LLM]:
    with LLM(random_checkpoint, **RANDOM) as llm:
        yield llm


def test_every_sample_of_smollm2_is_valid(smollm2):
    for name, texts in draw(smollm2, list(CASES), SAMPLES).items():
        for text in texts:
            CASES[name][1](text)


@pytest.mark.parametrize("name", CASES)
def test_every_sample_of_noise_is_valid(random_model, name):
    texts = draw(random_model, [name], NOISE_SAMPLES)[name]
    for text in texts:
        CASES[name][1](text)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("regex", ["abc|abd", "a{1,3}"])
def test_an_output_ends_with_its_grammar_even_where_eos_does_not_end_it(random_model, regex):
    params = sampling(StructuredOutputsParams(regex=regex), ignore_eos=True)
    [output] = random_model.generate("x", params, use_tqdm=False)
    [completion] = output.outputs
    assert re.fullmatch(regex, completion.text)
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) <= 4


def test_jumping_ahead_takes_fewer_steps_and_changes_nothing(random_checkpoint):
    """Greedy, so that every mask decides."""
    schema = closed(
        first_name_of_the_person={"const": "Alexander"}, year_of_birth={"enum": [1901, 1950]}
    )
    greedy = sampling(
        StructuredOutputsParams(json=schema, disable_any_whitespace=True), temperature=0.0
    )
    tokens, steps = {}, {}
    for jump_ahead in (True, False):
        with LLM(random_checkpoint, **RANDOM, grammar_jump_ahead=jump_ahead) as llm:
            client, calls = llm._client, []
            step = client.get_output
            client.get_output = lambda step=step, calls=calls: calls.append(1) or step()
            [output] = llm.generate("A person:", greedy, use_tqdm=False)
            tokens[jump_ahead], steps[jump_ahead] = output.outputs[0].token_ids, len(calls)
    assert tokens[True] == tokens[False]
    assert steps[True] < steps[False] / 2


def test_a_bad_grammar_is_refused_and_the_engine_goes_on(random_model):
    for schema, reason in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#"}, "end"),
    ):
        with pytest.raises(ValueError, match=f"structured_outputs: json: .*{reason}"):
            random_model.generate("x", sampling(StructuredOutputsParams(json=schema)))
    [output] = random_model.generate("x", sampling(StructuredOutputsParams(choice=["fine"])))
    assert output.outputs[0].text == "fine"
