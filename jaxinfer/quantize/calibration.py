"""Running a calibration text through a model, one layer at a time: no more than a layer's weights is held, and of the
activations only the stream between layers and each matrix's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.models.batch import RaggedBatch
from jaxinfer.models.cache_spec import layer_caches
from jaxinfer.models.decoder import DecoderLayer
from jaxinfer.models.functional import FlatModule
from jaxinfer.models.layers import scaled
from jaxinfer.models.norms import sum_of_parts
from jaxinfer.models.registry import ModelDescription
from jaxinfer.models.rope import Rotation, no_rotation, rotation
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quantize.linears import Input
from jaxinfer.quantize.search import InputMoments
from jaxinfer.weights.loader import read_leaves
from jaxinfer.weights.plan import LoadPlan
from jaxinfer.weights.reader import CheckpointReader

DEFAULT_TEXT = Path(__file__).parent / "data" / "opticks.txt"
_PAGE_SIZE = 16
_BATCH_TOKENS = 2048
_DTYPE = jnp.dtype(jnp.float32)


def calibration_samples(
    tokenizer: Tokenizer, text: str, num_samples: int, sample_length: int
) -> np.ndarray:
    """[num_samples, sample_length] token ids, spread evenly over the text; each begins as the tokenizer begins texts.

    Raises `ValueError` where the text is too short.
    """
    prefix = tokenizer.encode("")
    length = sample_length - len(prefix)
    if length < 1:
        raise ValueError(f"sample_length must be at least {len(prefix) + 1}, got {sample_length}.")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < num_samples * length:
        raise ValueError(
            f"calibration text has {len(ids)} tokens, too few for num_samples ({num_samples}) of sample_length "
            f"({sample_length})."
        )
    starts = np.arange(num_samples) * (len(ids) // num_samples)
    return np.array([[*prefix, *ids[start : start + length]] for start in starts], np.int32)


class CalibrationRun:
    """The samples on their way through the layers: `moments` are of the inputs of the one that is next, and `advance` takes
    them through it, as it has become. So each layer is fitted to what those before it hand on once they are rounded."""

    def __init__(
        self,
        description: ModelDescription,
        plan: LoadPlan,
        reader: CheckpointReader,
        samples: np.ndarray,
    ) -> None:
        """`samples`: [N, L] token ids."""
        self._spec, self._plan, self._reader = description.spec, plan, reader
        self._mesh = make_mesh(1)
        self._index = 0
        rows = max(1, _BATCH_TOKENS // samples.shape[1])
        batches = [samples[i : i + rows] for i in range(0, len(samples), rows)]
        self._batches = [_ragged_batch(batch) for batch in batches]
        self._streams = [self._embedded(batch) for batch in batches]

    def _embedded(self, samples: np.ndarray) -> jax.Array:
        """[T, E]"""
        (name,) = self._plan["embed",].names
        embedding = self._reader.read(name, np.dtype(np.float32))
        stream = jnp.asarray(embedding[samples.reshape(-1)])
        return stream if self._spec.embed_scale is None else stream * self._spec.embed_scale

    def moments(self) -> dict[Input, InputMoments]:
        """What the next layer's matrices get, summed over the samples' tokens."""
        layer = self._layer(self._reader)
        total: dict[Input, InputMoments] = {}
        for arguments in self._arguments(layer):
            moments = _moments_of(*arguments)
            total = {name: total[name] + m if total else m for name, m in moments.items()}
        return total

    def advance(self, changed: Mapping[str, np.ndarray]) -> None:
        """Through the next layer, whose tensors are those of the checkpoint, or `changed` by name."""
        layer = self._layer(_Changed(self._reader, changed))
        self._streams = [_stream_after(*arguments) for arguments in self._arguments(layer)]
        self._index += 1

    def _arguments(self, layer: DecoderLayer) -> Iterator[tuple]:
        graphdef, state = nnx.split(layer)
        caches = self._caches()
        for stream, batch in zip(self._streams, self._batches, strict=True):
            num_pages = batch.block_tables.size + 1
            pages = tuple(jnp.zeros((num_pages, *shape), _DTYPE) for shape in caches)
            yield graphdef, state, stream, pages, batch, _rotation(layer, batch)

    def _layer(self, reader: CheckpointReader | _Changed) -> DecoderLayer:
        spec, path = self._spec, ("layers", str(self._index))

        def make() -> DecoderLayer:
            layer = spec.layers[self._index]
            return DecoderLayer(layer, spec.norm, spec.embed_dim, self._mesh, _DTYPE, _DTYPE)

        flat = FlatModule.create(make, self._mesh)
        plan = {leaf: self._plan[(*path, *leaf)] for leaf in flat.leaves}
        leaves = dict(read_leaves(reader, plan, flat.leaves))
        return flat.bind([jnp.asarray(leaves[leaf]) for leaf in flat.leaves])

    def _caches(self) -> list[tuple[int, ...]]:
        """Shapes of a page of keys, and of values."""
        cache = layer_caches(self._spec, ShardedDims.create(self._spec, 1), _DTYPE)[self._index]
        return [array.page_shape(_PAGE_SIZE) for array in cache.arrays]


class _Changed:
    """A checkpoint some of whose tensors are others."""

    def __init__(self, reader: CheckpointReader, tensors: Mapping[str, np.ndarray]) -> None:
        self._reader, self._tensors = reader, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        if name not in self._tensors:
            return self._reader.read(name, dtype)
        tensor = self._tensors[name]
        return tensor if dtype is None else tensor.astype(dtype)


def _ragged_batch(samples: np.ndarray) -> RaggedBatch:
    """All samples as requests that are prefilled at once."""
    num_samples, length = samples.shape
    pages_per_row = -(-length // _PAGE_SIZE)
    tables = 1 + np.arange(num_samples * pages_per_row).reshape(num_samples, pages_per_row)
    positions = np.arange(length)
    slots = tables[:, positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE
    arrays = (
        samples.reshape(-1),
        np.tile(positions, num_samples),
        slots.reshape(-1),
        length * np.arange(num_samples + 1),
        np.full(num_samples, length),
        tables,
    )
    return RaggedBatch(*(jnp.asarray(array, jnp.int32) for array in arrays), decode_only=False)


def _rotation(layer: DecoderLayer, batch: RaggedBatch) -> Rotation:
    attention = layer.spec.attention
    if attention.rope is None:
        return no_rotation(len(batch.positions), attention.head_dim)
    return rotation(attention.rope, batch.positions)


def _run(
    graphdef: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x_te: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    batch: RaggedBatch,
    rope: Rotation,
) -> tuple[jax.Array, dict[Input, jax.Array]]:
    """A layer with its norms before attention and MLP, or on both sides: the stream after it, and its matrices' inputs."""
    layer = nnx.merge(graphdef, state)

    def added(x_te: jax.Array, update: jax.Array, post_norm: str) -> jax.Array:
        update, norm = sum_of_parts(update), layer.norm_named(post_norm)
        update = update if norm is None else norm(update)
        return x_te + scaled(update, layer.spec.residual_scale)

    attention_in = layer.norm_named("attention_norm")(x_te)
    attended, _ = layer.attention.attended(attention_in, pages, batch, rope)
    x_te = added(x_te, layer.attention.project(attended), "attention_post_norm")
    mlp_in = layer.norm_named("mlp_norm")(x_te)
    hidden = layer.mlp.hidden(mlp_in)
    x_te = added(x_te, layer.mlp.project(hidden), "mlp_post_norm")
    return x_te, {
        "attention": attention_in,
        "attended": attended.reshape(len(attended), -1),
        "mlp": mlp_in,
        "hidden": hidden,
    }


@partial(jax.jit, static_argnums=0)
def _stream_after(*arguments: Any) -> jax.Array:
    return _run(*arguments)[0]


@partial(jax.jit, static_argnums=0)
def _moments_of(*arguments: Any) -> dict[Input, InputMoments]:
    return {name: _moments(x_ti) for name, x_ti in _run(*arguments)[1].items()}


def _moments(x_ti: jax.Array) -> InputMoments:
    products = jnp.matmul(x_ti.T, x_ti, precision=jax.lax.Precision.HIGHEST)
    return InputMoments(products, jnp.abs(x_ti).sum(0), jnp.asarray(len(x_ti), jnp.float32))
