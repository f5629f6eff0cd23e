"""What else the machine has, on the same shapes: PyTorch's attention kernels, and transformers with the same model."""

from __future__ import annotations

from benchmarks.gpu import torch_attention, transformers_peer
from benchmarks.gpu.cases import Case, Context


def cases(context: Context) -> list[Case]:
    return [*torch_attention.cases(context), *transformers_peer.cases(context)]
