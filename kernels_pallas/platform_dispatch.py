"""Operations that choose their implementation when a program is lowered, by the platform it is lowered for.

Which device a traced program will run on is known only then, and with an ahead-of-time target it is not any device of
this process. `jax.lax.platform_dependent` would trace every branch on every platform, so that a CPU would import and
trace Pallas kernels it can't run; here one implementation is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec


class PlatformDispatch:
    """A function of arrays with one implementation per platform. It can't be differentiated or batched by `vmap`.

    Implementations take the same arguments (trees of arrays, and hashable keyword options) and return the same shapes.
    """

    def __init__(
        self, name: str, default: Callable[..., Any], **per_platform: Callable[..., Any]
    ) -> None:
        """`per_platform` has JAX's names of platforms ("cuda"); `default` serves all others."""
        self._default = default
        self._primitive = Primitive(name)
        self._primitive.multiple_results = True
        self._primitive.def_abstract_eval(_abstract_eval)
        self._primitive.def_impl(self._run_eagerly)
        mlir.register_lowering(self._primitive, _lowering(default))
        for platform, implementation in per_platform.items():
            mlir.register_lowering(self._primitive, _lowering(implementation), platform=platform)

    def __call__(self, *args: Any, **options: Any) -> Any:
        results = jax.eval_shape(functools.partial(self._default, **options), *args)
        leaves, in_tree = jax.tree.flatten(args)
        shapes, out_tree = jax.tree.flatten(results)
        out = self._primitive.bind(
            *leaves,
            in_tree=in_tree,
            out_types=tuple((shape.shape, shape.dtype) for shape in shapes),
            options=tuple(sorted(options.items())),
        )
        return jax.tree.unflatten(out_tree, out)

    def _run_eagerly(self, *leaves: jax.Array, **params: Any) -> list[jax.Array]:
        return _compiled(self._primitive, tuple(sorted(params.items())))(*leaves)


@functools.lru_cache(maxsize=256)
def _compiled(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _abstract_eval(
    *operands: jax.core.ShapedArray, out_types: tuple[Any, ...], **_: Any
) -> list[jax.core.ShapedArray]:
    # On the operands' mesh, as results of JAX's own operations are: types that differ in it alone would have a jitted
    # function traced twice.
    meshes = [operand.sharding.mesh for operand in operands]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)

    def sharding(shape: tuple[int, ...]) -> NamedSharding | None:
        return None if mesh is None else NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))

    return [
        jax.core.ShapedArray(shape, dtype, sharding=sharding(shape)) for shape, dtype in out_types
    ]


def _lowering(implementation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*leaves: jax.Array, in_tree: Any, out_types: Any, options: Any) -> list[jax.Array]:
        results = implementation(*jax.tree.unflatten(in_tree, leaves), **dict(options))
        leaves_out = jax.tree.leaves(results)
        assert tuple((leaf.shape, leaf.dtype) for leaf in leaves_out) == out_types
        return leaves_out

    return mlir.lower_fun(call, multiple_results=True)
