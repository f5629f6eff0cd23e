"""What reads the matrices of a quantized checkpoint."""

from __future__ import annotations

from typing import Protocol

from jaxinfer.weights.quantization.matrix import MatrixFormat, QuantizedMatrix
from jaxinfer.weights.quantization.tensors import ModuleTensors


class Scheme(Protocol):
    """How one module's weight is stored. A module's tensors are named by its own name and a suffix."""

    @property
    def weight(self) -> str:
        """Suffix of the tensor by which a quantized module is known."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Suffixes of what else may belong to the weight."""
        ...

    @property
    def logical(self) -> str:
        """Suffix of the name that the weight would have if it were not quantized."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether that weight has its last two axes the other way round, [in, out]."""
        ...

    def shape(self, tensors: ModuleTensors) -> tuple[int, ...]:
        """[out, in]; raises `CheckpointError` where the tensors' shapes don't agree."""
        ...

    def format(self, tensors: ModuleTensors) -> MatrixFormat: ...

    def read(self, tensors: ModuleTensors) -> QuantizedMatrix: ...
