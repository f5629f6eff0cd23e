"""Mark of tests that compile for a GPU that is not there."""

from __future__ import annotations

import pytest

from kernels_pallas.gpu_target import missing_compiler

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
