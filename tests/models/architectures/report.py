"""docs/models.md."""

from __future__ import annotations

from collections.abc import Callable

from tests.models.architectures.entry import NUM_NEW_TOKENS, Entry
from tests.models.architectures.oracle import TOLERANCE
from tests.models.architectures.reasons import REASONS
from tests.models.architectures.results import Result, Results
from tests.models.architectures.table import ENTRIES, REPOSITORY, digest, mapping

_EXAMPLE = REPOSITORY / "tests" / "models" / "own_family.py"

_INTRODUCTION = """\
# Models

Every entry of transformers' mapping of causal language models (version {version}), {proven} of {total} proven. This page is
written by `make test-models`, which runs what it says (about ten minutes of CPU time, and where it was broken off it goes on);
every test run proves a sample that changes from commit to commit.

**Proven** means: transformers makes a tiny random checkpoint of the architecture, with no bias zero and no norm weight one,
windows shorter than the prompt, soft caps that bite and rotations scaled where the family has them, and saves it as
safetensors. jaxinfer loads it and runs two requests in one batch, prefill in chunks of up to 8 tokens, then {tokens} greedy
tokens each, in float32 on one device and on two. All tokens are transformers' and all logits within {tolerance:g} of its.
Variants are configs of the same architecture that compute something else.

Checkpoints with other features than those are refused when they are loaded, with the name of the field: an unknown rotary
type or activation, tensors that the model has no place for.
"""

_OWN_FAMILIES = """\
## A model of your own

`jaxinfer.models.register(family)` adds a family from outside the package: how its config reads as a `DecoderSpec`, and what
its tensors are called. Llama with squared ReLUs and without a gate, under names of its own:

```python
{example}```

`LLM("path/to/it")` then serves checkpoints whose config.json names the architecture. The engine core of `jaxinfer serve` is a
process of its own: a package whose `FAMILY` is an entry point of the group `jaxinfer.families` has it registered there too.
`Names` lists what a checkpoint can call its tensors, and `AttentionSpec`, `LayerSpec` and `DecoderSpec` (`jaxinfer/models/spec.py`) what a model can be.
"""


def render(results: Results) -> str:
    """The page. Raises `ValueError` where an entry isn't known to be proven."""
    return _render(lambda entry: results.get(entry.name, digest(entry)))


def _render(result_of: Callable[[Entry], Result | None]) -> str:
    from transformers import __version__

    variants: dict[str, list[Entry]] = {}
    for entry in ENTRIES.values():
        if (result := result_of(entry)) is None or not result.proven:
            raise ValueError(f"{entry.name} is not proven: {result or 'not run'}")
        variants.setdefault(entry.model_type, []).append(entry)
    rows = [
        row(name, architecture, variants.get(name, [])) for name, architecture in mapping().items()
    ]
    introduction = _INTRODUCTION.format(
        version=__version__,
        proven=len(variants),
        total=len(rows),
        tokens=NUM_NEW_TOKENS,
        tolerance=TOLERANCE,
    )
    own = _OWN_FAMILIES.format(example=_EXAMPLE.read_text())
    table = ["| model type | architecture | state |", "|---|---|---|", *rows]
    return "\n".join([introduction, own, "## All entries", "", *table, ""])


def row(name: str, architecture: str, entries: list[Entry]) -> str:
    names = [entry.variant for entry in entries if entry.variant]
    state = REASONS[name] if not entries else "**proven**"
    if names:
        state += (
            f" ({', '.join(names)})" if len(names) < len(entries) else f" as {', '.join(names)}"
        )
    return f"| {name} | {architecture} | {state} |"
