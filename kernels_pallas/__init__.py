"""Paged-attention operations for JAX, usable with plain arrays and without jaxinfer."""

from kernels_pallas.add_rms_norm.api import add_rms_norm
from kernels_pallas.grouped_matmul.api import grouped_matmul
from kernels_pallas.kv_cache_update.api import kv_cache_update
from kernels_pallas.mla_attention.api import mla_attention
from kernels_pallas.mla_attention.cache_update import mla_cache_update
from kernels_pallas.quantized_matmul.api import quantized_matmul
from kernels_pallas.quantized_matmul.format import WeightFormat
from kernels_pallas.quantized_matmul.weight import QuantizedWeight
from kernels_pallas.ragged_paged_attention.api import ragged_paged_attention
from kernels_pallas.rope_kv_cache_update.api import rope_kv_cache_update
from kernels_pallas.shared_prefix_attention.api import SharedPrefixes, shared_prefix_attention

__all__ = [
    "QuantizedWeight",
    "SharedPrefixes",
    "WeightFormat",
    "add_rms_norm",
    "grouped_matmul",
    "kv_cache_update",
    "mla_attention",
    "mla_cache_update",
    "quantized_matmul",
    "ragged_paged_attention",
    "rope_kv_cache_update",
    "shared_prefix_attention",
]
