"""Which device a function is being traced for, so that no time goes into kernels that can't run there."""

from __future__ import annotations

import functools
import logging

import jax

_log = logging.getLogger(__name__)
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def traced_device_kind(platform: str) -> str | None:
    """The kind of the device that is compiled for if it may be one of `platform` ("gpu"), else None.

    An abstract mesh in scope, as compiling without the device has one, outranks the process's default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    return device.device_kind if device.platform == platform else None


def not_hopper() -> str | None:
    """Why the kernels for compute capability 9.0 can't run on the device that is traced for, or None."""
    kind = traced_device_kind("gpu")
    if kind is None:
        return "the device traced for is not a GPU of compute capability 9.0"
    return None if hopper(kind) else f"{kind} does not have compute capability 9.0"


def hopper(device_kind: str) -> bool:
    """Whether the kernels for compute capability 9.0 run there."""
    return any(name in device_kind.replace("-", " ").split() for name in _HOPPER)


@functools.cache
def log_once(message: str) -> None:
    """Says which kernels a call takes; once per process, as every layer of every program asks."""
    _log.info(message)
