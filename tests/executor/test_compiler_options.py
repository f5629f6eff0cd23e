"""XLA's options for a forward step, by the devices that it is for."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import pytest

from jaxinfer.executor import compiler_options
from jaxinfer.executor.compiler_options import deterministic_options, forward_options
from jaxinfer.parallel.mesh import MODEL_AXIS, make_mesh
from kernels_pallas.gpu_target import device_mesh, get_target
from tests.gpu_compiler import needs_compiler


def test_a_cpu_gets_none():
    assert forward_options(make_mesh(1)) is None
    assert deterministic_options(make_mesh(1)) == {}


@needs_compiler
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_hopper_gpu_gets_its_matmuls_whole(num_devices):
    mesh = device_mesh("h200", num_devices, MODEL_AXIS)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert forward_options(mesh) == {"xla_gpu_experimental_force_split_k": 1}
        assert deterministic_options(mesh) == {"xla_gpu_autotune_level": 0}


@needs_compiler
def test_other_gpus_get_none():
    target = replace(get_target("h100"), name="a100", device_name="NVIDIA A100-SXM4-80GB")
    assert forward_options(device_mesh(target, 1, MODEL_AXIS)) is None


@needs_compiler
def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(compiler_options, "WHOLE_MATMULS", {"xla_gpu_no_such_option": 1})
    mesh = device_mesh("h200", 1, MODEL_AXIS)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), caplog.at_level(logging.WARNING):
        assert forward_options(mesh) is None
    assert "XLA refuses {'xla_gpu_no_such_option': 1}" in caplog.text
