"""A model's costs against its weights: what a product reads, it multiplies once per token."""

from __future__ import annotations

import mmap
import os

import jax
import numpy as np
import pytest

from jaxinfer.executor.accounting import device_memory, step_costs
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.registry import describe_model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.weights.resolve import open_checkpoint, resolve_model
from tests.tiny_checkpoints import tiny_checkpoint


def decoder(name, num_devices=1, kv_dtype=None):
    config = open_checkpoint(resolve_model(str(tiny_checkpoint(name)))).config()
    spec = describe_model(config, None).spec
    return FunctionalDecoder.create(spec, make_mesh(num_devices), "bfloat16", kv_dtype)


def products(decoder):
    """Number of weights of all matrices in layers: what is left without norms, biases, embedding and head."""
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in decoder.leaves.items()
        if path not in (("embed",), ("lm_head",)) and np.prod(leaf.shape) > 40 * 48
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_costs_are_those_of_the_weights(name):
    """On one device nothing is padded."""
    model = decoder(name)
    spec, costs = model.spec, step_costs(model)
    assert costs.token_flops == 2 * products(model)
    assert costs.logits_flops == 2 * spec.embed_dim * spec.vocab_size
    embed = 2 * spec.embed_dim * spec.vocab_size
    every = sum(2 * int(np.prod(leaf.shape)) for leaf in model.leaves.values())
    assert costs.weight_bytes == every - (0 if spec.tied_head else embed)
    assert costs.peak_flops is None and costs.peak_bandwidth is None
    pages = model.kv_cache_shapes(1, 1)[0]
    assert costs.kv_bytes == sum(2 * int(np.prod(part.shape)) for part in pages)
    assert sum(number for _, number in costs.windows) == len(spec.layers)


def test_windows_and_devices_and_8_bits():
    windows = dict(step_costs(decoder("gemma3")).windows)
    assert set(windows) == {None, next(iter(set(windows) - {None}))}
    one, two = (step_costs(decoder("llama_biased", n)) for n in (1, 2))
    assert two.token_flops == one.token_flops / 2 and two.kv_bytes == one.kv_bytes / 2
    assert one.weight_bytes / 2 < two.weight_bytes < 0.7 * one.weight_bytes
    assert step_costs(decoder("llama_biased", 1, "int8")).kv_bytes == one.kv_bytes / 2


def test_memory_of_a_cpu_is_the_process_and_the_machine():
    found = device_memory(jax.devices("cpu")[0])
    with mmap.mmap(-1, 1 << 26) as block:  # new pages, where malloc may reuse resident ones
        block.write(bytes(1 << 20) * 64)
        after = device_memory(jax.devices("cpu")[0])
    assert after.used_bytes - found.used_bytes > 1 << 25
    assert after.limit_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
