"""Which attention backend is taken where, and what the Mosaic GPU one refuses before it launches anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from kernels_pallas import ragged_paged_attention
from kernels_pallas.compile_job import run_job
from kernels_pallas.ragged_paged_attention.mosaic_gpu import config as configs
from kernels_pallas.ragged_paged_attention.mosaic_gpu.config import DecodeConfig, PrefillConfig
from kernels_pallas.trace_target import hopper, traced_device_kind
from tests.gpu_compiler import needs_compiler


def job(function: str, **arguments: Any) -> Any:
    path = (str(Path(__file__).parent),)
    return run_job(f"backend_choice_jobs:{function}", arguments, timeout=240, python_path=path)


@needs_compiler
def test_a_hopper_gpu_gets_the_mosaic_kernels_alone_and_under_shard_map():
    for num_devices, result in job("on_an_h200").items():
        assert result["mosaic_kernels"] == 2, num_devices
        assert result["log"] == ["Attention uses the Mosaic GPU kernels."], num_devices
        assert result["page_inputs"] == ["kv_pages[0]", "kv_pages[1]"], num_devices
        assert result["pages_moved"] == [], num_devices


@needs_compiler
def test_other_shapes_take_xla_and_the_log_says_why_once():
    reasons = {
        "dtype": ("float32", "q_tnh has dtype float32, not one of ('bfloat16', 'float16')"),
        "head_size": (192, "head size 192 is not one of (64, 80, 96, 128, 256)"),
        "page_size": (8, "page size 8 is not one of (16, 32, 64, 128)"),
    }
    results = job("of_other_shapes", shapes=[{name: x} for name, (x, _) in reasons.items()])
    for (_, reason), result in zip(reasons.values(), results, strict=True):
        assert result["mosaic_kernels"] == 0
        expected = f"Attention uses XLA instead of the Mosaic GPU kernels: {reason}."
        assert result["log"] == [expected]


def test_nothing_is_traced_for_a_gpu_on_a_cpu():
    assert traced_device_kind("gpu") is None
    assert hopper("NVIDIA H200")
    assert hopper("NVIDIA H100 80GB HBM3")
    assert hopper("NVIDIA GH200 480GB")
    assert not hopper("NVIDIA A100-SXM4-80GB")
    assert not hopper("NVIDIA B200")


@needs_compiler
def test_every_operation_takes_xla_on_another_gpu_and_says_why_once():
    result = job("on_an_a100")
    assert result["mosaic_kernels"] == 0
    reason = "NVIDIA A100-SXM4-80GB does not have compute capability 9.0"
    assert result["log"] == [
        f"rope_kv_cache_update runs as XLA operations: {reason}.",
        f"Attention uses XLA instead of the Mosaic GPU kernels: {reason}.",
    ]
    assert len(result["refused"]) == 2
    for refusal in result["refused"]:
        assert refusal == f"The Mosaic GPU backend does not take this call: {reason}."


def test_a_demand_for_the_gpu_kernels_is_refused_on_a_cpu():
    q, pages = jnp.zeros((2, 4, 64), jnp.bfloat16), jnp.zeros((3, 2, 16, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"Mosaic GPU backend .* not a GPU of compute capability"):
        ragged_paged_attention(
            q,
            (pages, pages),
            jnp.zeros((2, 1), jnp.int32),
            jnp.zeros(2, jnp.int32),
            jnp.zeros(3, jnp.int32),
            scale=1.0,
            implementation="mosaic_gpu",
        )


def test_explicit_use_with_an_unsupported_shape_is_refused():
    q, pages = jnp.zeros((2, 4, 64)), jnp.zeros((3, 2, 16, 64))
    rows = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"Mosaic GPU backend .* q_tnh has dtype float32"):
        ragged_paged_attention(
            q,
            (pages, pages),
            jnp.zeros((2, 1), jnp.int32),
            rows,
            jnp.zeros(3, jnp.int32),
            scale=1.0,
            implementation="mosaic_gpu",
        )


@pytest.mark.parametrize("head_size", configs.head_sizes())
def test_tuned_sizes_fit_the_gpu(head_size):
    config = configs.prefill_config(head_size)
    config.check(head_size, 2)
    assert config.stages >= 2
    config = configs.decode_config(head_size, 8, 2)
    config.check(head_size, 8, 2)
    assert config.slots >= 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: DecodeConfig(64, 2), "DecodeConfig.slots must be at least 3, got 2"),
        (lambda: DecodeConfig(96, 3), "DecodeConfig.block_tokens must be 64 or 128, got 96"),
        (lambda: DecodeConfig(64, 3, min_blocks=0), "DecodeConfig.min_blocks must be at least 1"),
        (lambda: PrefillConfig(64, 2, consumers=3), "PrefillConfig.consumers must be 1 or 2"),
        (
            lambda: DecodeConfig(64, 16).check(128, 64, 2),
            "DecodeConfig needs 342016 bytes of shared memory at head size 128; a block has 232448",
        ),
        (
            lambda: PrefillConfig(128, 3).check(256, 2),
            "PrefillConfig needs .* bytes of shared memory at head size 256",
        ),
    ],
)
def test_configs_that_can_not_run_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config()
