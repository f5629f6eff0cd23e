"""`jaxinfer quantize`: a checkpoint with weights of 4 or 8 bits, for this engine and others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import ModelDescription, describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quantize.awq import ScaledLayer, rounded_matrices, scaled_layer
from jaxinfer.quantize.calibration import DEFAULT_TEXT, CalibrationRun, calibration_samples
from jaxinfer.quantize.formats import AwqFormat, CompressedTensorsFormat, Format
from jaxinfer.quantize.grids import Int4Groups
from jaxinfer.quantize.linears import find_folds, find_matrices, why_not_searched
from jaxinfer.quantize.options import GROUP_SIZES, QuantizeOptions
from jaxinfer.quantize.writer import ShardWriter, write_surroundings
from jaxinfer.weights.loader import check_plan
from jaxinfer.weights.orbax import check_new_directory
from jaxinfer.weights.plan import LoadPlan
from jaxinfer.weights.reader import CheckpointReader, numpy_dtype
from jaxinfer.weights.resolve import ModelFiles, open_checkpoint, resolve_model

logger = logging.getLogger(__name__)

_SHARD_BYTES = 4 << 30


def quantize(
    model: str,
    out: str | Path,
    options: QuantizeOptions | None = None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write `model` with quantized weights to the new directory `out`, as a Hugging Face checkpoint.

    Without an embedding of 8 bits method "awq" writes AutoAWQ's format, all else is compressed-tensors'. Raises
    `ValueError` for a model that can't be found, read or quantized so, a calibration text that is too short, or where
    `out` exists already.
    """
    options = options or QuantizeOptions()
    out = Path(out).expanduser()
    check_new_directory(out)
    files = resolve_model(model, revision=revision, download_dir=download_dir)
    source = _Source.open(files)
    matrices = find_matrices(source.description, source.plan, source.reader)
    layout = _layout(options, source, matrices)
    samples = _samples(options, source)
    out.mkdir(parents=True, exist_ok=True)
    try:
        shards = ShardWriter(out, shard_bytes)
        for name, tensor in _tensors(options, source, matrices, layout, samples):
            shards.add(name, tensor)
        shards.finish()
        ignored = _ignored(source, matrices)
        write_surroundings(out, files, source.reader, source.tokenizer, layout.config(ignored))
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return out


@dataclass(frozen=True)
class _Source:
    """The checkpoint that is quantized."""

    reader: CheckpointReader
    description: ModelDescription
    plan: LoadPlan
    tokenizer: Tokenizer
    dtype: np.dtype
    """In which its matrices are meant to be used."""
    as_stored: bool
    """Whether its tensors are read in their own dtypes, or all in `dtype`."""

    @classmethod
    def open(cls, files: ModelFiles) -> _Source:
        reader = open_checkpoint(files)
        if reader.holds_leaves:
            raise ValueError(f"{files.path} is a converted checkpoint; quantize the original.")
        present = reader.config().get("quantization_config")
        if present is not None:
            raise ValueError(
                f"{files.path} is quantized already (quant_method {present.get('quant_method')!r}); quantize the "
                "original."
            )
        description = describe_model(reader.config())
        decoder = FunctionalDecoder.create(description.spec, make_mesh(1), reader.dtype)
        plan = description.checkpoint_plan(decoder.dims, reader.names())
        check_plan(reader, plan, decoder.leaves, description.ignored_tensors)
        return cls(
            reader,
            description,
            plan,
            Tokenizer.load(files),
            numpy_dtype(reader.dtype),
            as_stored=files.kind == "hf",
        )

    def read(self, name: str) -> np.ndarray:
        return self.reader.read(name, None if self.as_stored else self.dtype)

    @property
    def embedding(self) -> str:
        return self.plan["embed",].names[0]


def _layout(
    options: QuantizeOptions, source: _Source, matrices: dict[str, tuple[int, int]]
) -> Format:
    embedding = options.embedding is not None
    if options.method != "awq":
        return CompressedTensorsFormat(options.method, source.dtype, int8_embedding=embedding)
    group_size = _group_size(options.group_size, matrices)
    logger.info("group size %d", group_size)
    if embedding:
        return CompressedTensorsFormat("int4", source.dtype, group_size, int8_embedding=True)
    return AwqFormat(group_size)


def _group_size(wanted: int | None, matrices: dict[str, tuple[int, int]]) -> int:
    """Raises `ValueError`, which names a matrix, where none or not the wanted one fits."""
    for name, shape in matrices.items():
        if shape[0] % 8:
            raise ValueError(
                f"{name} has {shape[0]} rows; method 'awq' packs 8 in a word and needs a multiple."
            )
    for size in (wanted,) if wanted else GROUP_SIZES:
        unfit = next((name for name, shape in matrices.items() if shape[1] % size), None)
        if unfit is None:
            return size
    raise ValueError(
        f"group_size {wanted or ' or '.join(map(str, GROUP_SIZES))} does not divide the {matrices[unfit][1]} columns of "
        f"{unfit}."
    )


def _samples(options: QuantizeOptions, source: _Source) -> np.ndarray | None:
    """Those to search scales with; None where none are searched."""
    if options.method != "awq" or not options.search:
        return None
    if (reason := why_not_searched(source.description.spec)) is not None:
        architecture = (source.description.architectures or ["this model"])[0]
        logger.warning(
            "%s has %s, for which no scales are searched: its weights are rounded to the nearest",
            architecture,
            reason,
        )
        return None
    text = (options.calibration or DEFAULT_TEXT).read_text(encoding="utf-8")
    return calibration_samples(source.tokenizer, text, options.num_samples, options.sample_length)


def _tensors(
    options: QuantizeOptions,
    source: _Source,
    matrices: dict[str, tuple[int, int]],
    layout: Format,
    samples: np.ndarray | None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Of the new checkpoint."""
    done: set[str] = set()
    if samples is not None:
        assert isinstance(layout, AwqFormat | CompressedTensorsFormat)
        for layer, rounded in _searched_layers(options, source, layout, samples):
            done |= rounded.keys() | layer.others.keys()
            yield from layer.others.items()
            for name, weight in rounded.items():
                yield from layout.packed(_module(name), weight).items()
    tied = source.description.spec.tied_head
    for name in source.reader.names():
        if name in done or (tied and name.endswith("lm_head.weight")):
            continue
        if name == source.embedding and options.embedding is not None:
            assert isinstance(layout, CompressedTensorsFormat)
            weight = source.read(name).astype(np.float32)
            yield from layout.quantized_embedding(_module(name), weight).items()
            continue
        tensor = source.read(name)
        if name in matrices:
            yield from layout.quantized(_module(name), tensor.astype(np.float32)).items()
        else:
            yield name, tensor


def _searched_layers(
    options: QuantizeOptions,
    source: _Source,
    layout: AwqFormat | CompressedTensorsFormat,
    samples: np.ndarray,
) -> Iterator[tuple[ScaledLayer, dict[str, Int4Groups]]]:
    spec, group_size = source.description.spec, layout.group_size
    assert group_size is not None
    run = CalibrationRun(source.description, source.plan, source.reader, samples)
    for i in range(len(spec.layers)):
        folds = find_folds(spec, source.plan, i)
        layer = scaled_layer(source.read, folds, run.moments(), group_size)
        rounded = rounded_matrices(
            layer,
            folds,
            group_size,
            layout.scale_dtype,
            clip=options.clip,
            compensate=options.compensate,
        )
        values = {name: np.asarray(weight.values()) for name, weight in rounded.items()}
        run.advance({**layer.others, **values})
        yield layer, rounded
        logger.info("layer %d of %d", i + 1, len(spec.layers))


def _ignored(source: _Source, matrices: dict[str, tuple[int, int]]) -> list[str]:
    """Modules that loaders would take for quantized: all others with a matrix, and the head, tied or not."""
    others = {
        _module(name)
        for name in source.reader.names()
        if name.endswith(".weight")
        and len(source.reader.shape(name)) == 2
        and name not in matrices
        and name != source.embedding
    }
    return sorted({"lm_head", *others})


def _module(name: str) -> str:
    return name.removesuffix(".weight")
