"""`jaxinfer convert`: a checkpoint in the form in which it loads fastest."""

from __future__ import annotations

from pathlib import Path


def convert(
    model: str,
    out: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """Write `model`'s leaves, configuration and tokenizer to the new directory `out`; `LLM(out)` then loads them.

    `dtype` "auto" keeps the checkpoint's. Raises `ValueError` for a model that can't be found, read or run, or where
    `out` exists already.
    """
    from jaxinfer.frontend.tokenizer import Tokenizer
    from jaxinfer.weights.orbax import check_new_directory, save_leaves
    from jaxinfer.weights.resolve import open_checkpoint, resolve_model

    out = Path(out).expanduser()
    check_new_directory(out)
    files = resolve_model(model, revision=revision, download_dir=download_dir)
    reader = open_checkpoint(files)
    tokenizer = Tokenizer.load(files)

    from jaxinfer.models.functional import FunctionalDecoder
    from jaxinfer.models.registry import describe_model
    from jaxinfer.parallel.mesh import make_mesh

    description = describe_model(reader.config())
    decoder = FunctionalDecoder.create(
        description.spec, make_mesh(1), reader.dtype if dtype == "auto" else dtype
    )
    plan = description.checkpoint_plan(decoder.dims, reader.names())
    save_leaves(out, reader, plan, decoder.leaves, ignored=description.ignored_tensors)
    tokenizer.save(out)
    return out
