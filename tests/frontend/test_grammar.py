"""From structured_outputs to grammars: each is tried on texts whose acceptance is decided elsewhere (`jsonschema`, `re`,
or by hand)."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from jaxinfer.frontend.grammar import grammar_of
from jaxinfer.frontend.json_schema import check_terminates
from jaxinfer.structured_outputs import StructuredOutputsParams as Params
from tests.frontend.tokenizers_for_tests import byte_level_tokenizer


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(
        byte_level_tokenizer().backend.to_str(), eos_token=byte_level_tokenizer().eos_token_id
    )


def accepts(params: Params, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), grammar_of(params))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "city": {"enum": ["北京", "上海"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DOCUMENTS = [
    {"name": "ann", "age": 3},
    {"name": "ann", "age": 120, "city": "上海"},
    {"name": "ann", "age": 7, "tags": [True, False], "next": None},
    {"name": "ann", "age": 7, "next": {"name": "bob", "age": 9}},
    {"name": "ann"},
    {"name": "", "age": 7},
    {"name": "annann", "age": 7},
    {"name": "Ann", "age": 7},
    {"name": "ann", "age": 2},
    {"name": "ann", "age": 121},
    {"name": "ann", "age": "7"},
    {"name": "ann", "age": 7, "city": "Rome"},
    {"name": "ann", "age": 7, "tags": []},
    {"name": "ann", "age": 7, "tags": [True] * 3},
    {"name": "ann", "age": 7, "next": {"name": "bob"}},
    {"name": "ann", "age": 7, "other": 1},
    [],
    "ann",
]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_accepts_what_jsonschema_accepts(as_text):
    params = Params(json=json.dumps(PERSON) if as_text else PERSON)
    verdicts = set()
    for document in DOCUMENTS:
        valid = jsonschema.Draft202012Validator(PERSON).is_valid(document)
        verdicts.add(valid)
        assert accepts(params, json.dumps(document, ensure_ascii=False)) == valid, document
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        (
            {},
            ['{"a":1}', '{ "a" : 1 }', '{\n    "a": 1\n}'],
            ['{  "a":1}', '{\n\n"a":1}', '{"a":1}\n'],
        ),
        (dict(disable_any_whitespace=True), ['{"a":1}'], ['{ "a":1}', '{"a": 1}', '{\n"a":1}']),
        (dict(whitespace_pattern=r"[\t]?"), ['{"a":1}', '{"a":\t1}'], ['{"a": 1}']),
        ({}, ['{"a":1,"b":2}'], []),
        (dict(disable_additional_properties=True), ['{"a":1}'], ['{"a":1,"b":2}']),
    ],
)
def test_whitespace_and_additional_properties(fields, allowed, refused):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = Params(json=schema, **fields)
    assert [accepts(params, text) for text in [*allowed, *refused]] == [True] * len(allowed) + [
        False
    ] * len(refused)


@pytest.mark.parametrize(
    "pattern",
    [
        "(|ab|c+)",
        "^(|ab|c+)$",
        "ab|^c$",
        r"\d{2,3}-\d*",
        "[^a-c]x?",
        "(?i)aB",
        r"a\.b|a\|b",
        "(a|b)*c",
    ],
)
def test_a_regex_accepts_what_re_fully_matches(pattern):
    texts = ["", *map("".join, product("abc", repeat=2)), *map("".join, product("abcx", repeat=1))]
    texts += [
        "ab",
        "aB",
        "AB",
        "a.b",
        "a|b",
        "12-",
        "123-45",
        "1-2",
        "ccc",
        "abababc",
        "^ab$",
        "zx",
    ]
    for text in texts:
        assert accepts(Params(regex=pattern), text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("name", ["a", "default", "format"])
def test_formats_that_json_schema_does_not_know_say_nothing(name):
    """Also where a property has a keyword's name, and what looks like one is data."""
    part = {"type": "string", "format": "path", "maxLength": 4}
    fixed = {"const": {"format": "path"}}
    schema = {"type": "object", "properties": {name: part, "x": fixed}, "required": [name]}
    assert accepts(Params(json=schema), json.dumps({name: "/tmp"}))
    assert accepts(Params(json=schema), json.dumps({name: "", "x": {"format": "path"}}))
    assert not accepts(Params(json=schema), json.dumps({name: "", "x": {}}))
    with pytest.raises(ValueError, match="json-pointer"):
        grammar_of(Params(json={"type": "string", "format": "json-pointer"}))


def test_digits_words_and_spaces_are_of_ascii():
    in_regex = Params(regex=r"\d\w\s")
    in_json = Params(json={"type": "string", "pattern": r"^\d\w[x ]$"})
    for params, quote in ((in_regex, ""), (in_json, '"')):
        assert accepts(params, f"{quote}4x {quote}")
        assert not any(accepts(params, f"{quote}{text}{quote}") for text in ("٤x ", "4ß "))


def test_choices_are_taken_literally():
    options = ["yes", 'say "no"', "a|b", "中文 🙂", "back\\slash", "two\nlines", "(x)*"]
    params = Params(choice=options)
    assert all(accepts(params, option) for option in options)
    assert not any(accepts(params, text) for text in ["", "ye", "yes ", "a", "xx", "say no"])


SUM_IN_LARK = """
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: /[0-9]{1,3}/
"""
SUM_IN_GBNF = """
root ::= term (("+" | "-") term)*
term ::= [0-9] [0-9]? [0-9]? | "(" root ")"
"""


@pytest.mark.parametrize("grammar", [SUM_IN_LARK, SUM_IN_GBNF])
def test_grammars_in_two_notations(grammar):
    params = Params(grammar=grammar)
    assert all(accepts(params, text) for text in ["1", "12+3", "(1-(2+3))-999"])
    assert not any(accepts(params, text) for text in ["", "1+", "(1", "1234", "1 + 2", "1*2"])


def test_json_object():
    params = Params(json_object=True)
    assert accepts(params, "{}") and accepts(params, '{"a": [1, {"b": null}]}')
    assert not any(accepts(params, text) for text in ["[]", "1", '{"a"}', "{"])


def test_structural_tag():
    call = dict(
        begin="<call=f>",
        schema={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        end="</call>",
    )
    tag = dict(structures=[call], triggers=["<call="])
    for params in (Params(structural_tag=tag), Params(structural_tag=json.dumps(tag))):
        assert accepts(params, "free text") and accepts(params, 'so: <call=f>{"x": 1}</call> done')
        assert not any(
            accepts(params, text)
            for text in ["<call=g>{}</call>", "<call=f>{}</call>", '<call=f>{"x": 1}']
        )


BAD = [
    (dict(regex="a(b"), "regex", "unclosed"),
    (dict(regex="(?=a)b"), "regex", "look-around"),
    (dict(regex=r"(a)\1"), "regex", "backreference"),
    (dict(grammar="start: thing"), "grammar", "thing"),
    (dict(grammar="root ::= thing"), "grammar", "thing"),
    (dict(json={"type": "array", "uniqueItems": True}), "json", "uniqueItems"),
    (dict(json={"type": "nonsense"}), "json", "nonsense"),
    (dict(json={"type": "integer", "minimum": 2, "maximum": 1}), "json", "nsatisfiable"),
    (dict(json={"$ref": "#/$defs/a"}), "json", "/$defs/a"),
    (dict(json={"$ref": "http://a.b/c"}), "json", "http://a.b/c"),
    (dict(json="{not json"), "json", "not JSON"),
    (dict(json="3"), "json", "JSON schema"),
    (dict(json="[" * 100_000), "json", "JSON"),
    (dict(json='{"anyOf": [' * 5000 + "{}" + "]}" * 5000), "json", ""),
    (dict(json={"type": "string", "pattern": "(?=a)"}), "json", "look-around"),
    (dict(json={"$ref": "#"}), "json", "without an end"),
    (dict(structural_tag={"structures": []}), "structural_tag", "triggers"),
    (
        dict(structural_tag={"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}),
        "structural_tag.structures[0]",
        "triggers",
    ),
]


@pytest.mark.parametrize(("fields", "name", "reason"), BAD, ids=str)
def test_what_is_no_grammar_is_refused_by_name(fields, name, reason):
    with pytest.raises(ValueError) as caught:
        grammar_of(Params(**fields))
    assert str(caught.value).startswith(f"structured_outputs: {name}") and reason in str(
        caught.value
    )
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(json={}, regex="a"),
        dict(json_object=False),
        dict(json_object=1),
        dict(choice=[]),
        dict(choice=["a", ""]),
        dict(choice="ab"),
        dict(regex=3),
        dict(json=3),
        dict(json_object=True, disable_any_whitespace=True, whitespace_pattern=" "),
        dict(json_object=True, disable_any_whitespace=1),
    ],
    ids=str,
)
def test_fields_that_say_nothing_or_too_much(fields):
    with pytest.raises(ValueError, match="structured_outputs"):
        Params(**fields)


def node(**properties: Any) -> dict[str, Any]:
    return dict(type="object", properties=properties, required=sorted(properties))


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (node(a={"$ref": "#"}), False),
        (node(a={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), True),
        (node(a={"type": "array", "items": {"$ref": "#"}}), True),
        (node(a={"type": "array", "items": {"$ref": "#"}, "minItems": 1}), False),
        (node(a={"type": ["object", "null"], "properties": {"b": {"$ref": "#"}}}), True),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            False,
        ),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, False),
        ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "string"}}}, True),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}, {}], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, True),
        ({"enum": [1]}, True),
        (True, True),
        (False, False),
    ],
    ids=str,
)
def test_schemas_without_an_end(schema, ends):
    if ends:
        check_terminates(schema)
    else:
        with pytest.raises(ValueError, match="finite"):
            check_terminates(schema)


def _has_document(schema: Any, finite: set[str]) -> bool:
    """The oracle: is there a document, if only references to `finite` definitions may be followed?"""
    if "$ref" in schema:
        return schema["$ref"].removeprefix("#/$defs/") in finite
    if "anyOf" in schema:
        return any(_has_document(option, finite) for option in schema["anyOf"])
    if schema.get("type") == "object":
        required = (schema["properties"][name] for name in schema["required"])
        return all(_has_document(part, finite) for part in required)
    if schema.get("type") == "array":
        return not schema.get("minItems") or _has_document(schema["items"], finite)
    return True


_NAMES = ["a", "b", "c", "d"]
_SCHEMAS = st.recursive(
    st.sampled_from([{"type": "null"}, *({"$ref": f"#/$defs/{name}"} for name in _NAMES * 3)]),
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.dictionaries(st.sampled_from("xyz"), part, max_size=2).map(lambda p: node(**p)),
        st.tuples(part, st.integers(0, 1)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1]}
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(_NAMES, _SCHEMAS)))
def test_the_end_is_found_where_a_search_finds_a_document(defs):
    schema = {"$ref": "#/$defs/a", "$defs": defs}
    finite: set[str] = set()
    for _ in _NAMES:
        finite |= {name for name in _NAMES if _has_document(defs[name], finite)}
    if "a" in finite:
        check_terminates(schema)
    else:
        with pytest.raises(ValueError, match="finite"):
            check_terminates(schema)


def test_long_chains_of_references_take_no_time_to_speak_of():
    size = 20_000
    defs = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(size)} | {str(size): {}}
    check_terminates({"$ref": "#/$defs/0", "$defs": defs})
    check_terminates({"$ref": "#/$defs/0", "$defs": dict(reversed(defs.items()))})
