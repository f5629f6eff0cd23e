"""What the model and the device are, in the numbers that metrics are made of."""

from __future__ import annotations

import os
from collections import Counter

import jax

from jaxinfer.engine.stats import DeviceMemory
from jaxinfer.engine.step_costs import StepCosts
from jaxinfer.models.encoders.encoder import Encoder
from jaxinfer.models.encoders.spec import EncoderSpec
from jaxinfer.models.functional import FlatModule, FunctionalDecoder
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.spec import AnyAttentionSpec
from jaxinfer.parallel.mesh import device_bytes, tensor_parallel_size
from kernels_pallas.gpu_target import TARGETS

_BITS_OF_PEAK = 16
"""The peaks are those of 16-bit matrix products."""


def step_costs(decoder: FunctionalDecoder) -> StepCosts:
    """Per device: with tensor parallelism, each has an equal share of everything but what a step reads of weights,
    which is what lies there: of a mixture, all experts."""
    spec = decoder.spec
    num_devices = tensor_parallel_size(decoder.mesh)
    dtype_bytes = decoder.dtype.itemsize
    attentions = spec.attentions
    weights = sum(layer.num_weights(spec.embed_dim) for layer in spec.layers)
    # Of an average layer, where they differ.
    pair_flops = sum(map(_pair_flops, attentions)) / max(len(attentions), 1)
    windows = Counter(cache.window for cache in decoder.caches)
    kv_arrays = decoder.kv_cache_shapes(1, 1)[0] if attentions else ()
    states = decoder.kv_cache_shapes(0, 1, num_slots=1)
    target = _target(decoder.mesh.devices.flat[0])
    has_peak = target is not None and 8 * dtype_bytes == _BITS_OF_PEAK
    return StepCosts(
        token_flops=2 * weights / num_devices,
        logits_flops=2 * spec.embed_dim * spec.vocab_size / num_devices,
        pair_flops=pair_flops / num_devices,
        weight_bytes=float(sum(map(device_bytes, _read_leaves(decoder)))),
        kv_bytes=float(sum(map(device_bytes, kv_arrays))),
        state_bytes=float(sum(map(device_bytes, jax.tree.leaves(states)))),
        windows=tuple(windows.items()),
        peak_flops=target.bf16_flops_per_second if has_peak and target else None,
        peak_bandwidth=target.bytes_per_second if has_peak and target else None,
    )


def encoder_costs(spec: EncoderSpec, module: FlatModule[Encoder], device: jax.Device) -> StepCosts:
    """An encoder keeps nothing: its tokens see all of a prompt, which counts here as twice what a decoder's see."""
    E, M = spec.embed_dim, spec.mlp_dim
    target = _target(device)
    dtype_bytes = module.leaves["embed",].dtype.itemsize
    has_peak = target is not None and 8 * dtype_bytes == _BITS_OF_PEAK
    return StepCosts(
        token_flops=2.0 * spec.num_layers * (4 * E * E + 2 * E * M),
        logits_flops=2.0 * E * spec.head.num_classes if spec.head else 0.0,
        pair_flops=8.0 * E,
        weight_bytes=float(
            sum(device_bytes(leaf) for path, leaf in module.leaves.items() if path != ("embed",))
        ),
        kv_bytes=0.0,
        windows=((None, spec.num_layers),),
        peak_flops=target.bf16_flops_per_second if has_peak and target else None,
        peak_bandwidth=target.bytes_per_second if has_peak and target else None,
    )


def _pair_flops(attention: AnyAttentionSpec) -> float:
    """Of one query token and one key, over all heads: its score, and the value's part in the result."""
    if isinstance(attention, LatentAttentionSpec):
        return 2 * attention.num_heads * (attention.cache_dim + attention.latent_rank)
    return 4 * attention.num_heads * attention.head_dim


def device_memory(device: jax.Device) -> DeviceMemory:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(int(stats.get("bytes_in_use", 0)), int(stats["bytes_limit"]))
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * page
    return DeviceMemory(resident, os.sysconf("SC_PHYS_PAGES") * page)


def _read_leaves(decoder: FunctionalDecoder) -> list[jax.ShapeDtypeStruct]:
    """All but an embedding that isn't the head too: of it, a step reads its tokens' rows."""
    return [
        leaf
        for path, leaf in decoder.leaves.items()
        if path[0] != "embed" or decoder.spec.tied_head
    ]


def _target(device: jax.Device):
    for target in TARGETS.values():
        if target.device_name == device.device_kind:
            return target
    return None
