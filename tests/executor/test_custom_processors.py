"""What may be registered as a logits processor."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer import EngineArgs, LogitsProcessor
from jaxinfer.executor.logits_processors import LogitsProcessors
from jaxinfer.logits_processors import check_importable, resolve_processors

HERE = f"{__name__}:identity"


def identity(logits, state):
    return logits


def other_shape(logits, state):
    return logits[:, 1:]


def other_dtype(logits, state):
    return logits.astype(jnp.bfloat16)


def broken(logits, state):
    return logits + state.parameters["missing"]


def on_the_host(logits, state):
    return logits if logits.sum() > 0 else -logits


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (other_shape, r"must return logits \(2, 40\)"),
        (other_dtype, "of float32"),
        (broken, "can't be traced: KeyError: 'missing'"),
        (on_the_host, "can't be traced: TracerBoolConversionError"),
    ],
)
def test_functions_that_are_no_processors(function, message):
    with pytest.raises(ValueError, match=rf"logits_processors\['mine'\] {message}|{message}"):
        LogitsProcessors(resolve_processors({"mine": function}), 40)


def test_found_by_name_or_given():
    made = LogitsProcessor(identity, ("a", "b"))
    assert made.parameters == {"a": None, "b": None}
    found = resolve_processors({"x": HERE, "y": identity, "z": made})
    assert found["x"].function is found["y"].function is identity and found["z"] is made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", 'must have the form "module:function"'),
        ("no_such_module:f", "can't import 'no_such_module:f'"),
        (f"{__name__}:absent", "absent"),
        (7, "must be a LogitsProcessor, a function"),
    ],
)
def test_not_found(given, message):
    with pytest.raises(ValueError, match=message):
        resolve_processors({"mine": given})


def test_bad_declarations():
    for arguments in ((3,), (identity, {"a": "x"}), (identity, [1])):
        with pytest.raises(ValueError, match=r"must be|parameters"):
            LogitsProcessor(*arguments)
    for given in ([identity], {1: identity}, {"a": 3}):
        with pytest.raises(ValueError, match="logits_processors"):
            EngineArgs("m", logits_processors=given)


def test_only_names_reach_another_process():
    check_importable({"mine": HERE})
    with pytest.raises(ValueError, match="a process of its own, which can't be given functions"):
        check_importable({"mine": identity})
