"""What `jaxinfer quantize` writes is what quantized checkpoints are read as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.quantize.options import QuantizeOptions
from jaxinfer.quantize.run import quantize
from jaxinfer.weights.quantization.reader import QuantizedReader
from jaxinfer.weights.resolve import ModelFiles, open_checkpoint
from tests.models.paged_harness import load_checkpoint
from tests.quantize.models import tiny_dir
from tests.quantize.unpacked import dequantized


@pytest.mark.parametrize("embedding", [None, "int8"])
@pytest.mark.parametrize("method", ["awq", "int8", "fp8"])
def test_the_reader_finds_the_weights_that_were_meant(
    method: str, embedding: str | None, tmp_path: Path
) -> None:
    options = QuantizeOptions(method=method, embedding=embedding, search=False)
    quantize(str(tiny_dir("llama")), tmp_path / "out", options)
    reader, expected = (
        open_checkpoint(ModelFiles("hf", tmp_path / "out")),
        dequantized(tmp_path / "out"),
    )
    assert isinstance(reader, QuantizedReader)
    assert set(reader.names()) == expected.keys()
    for name, tensor in expected.items():
        found = reader.read(name, np.dtype(np.float32))
        np.testing.assert_allclose(found, tensor, rtol=1e-6, atol=1e-7, err_msg=name)
    _, model, _ = load_checkpoint(tmp_path / "out")
    projections = {path for path in model.leaves if path[0] == "layers" and "parts" in path}
    assert projections and (("embed",) in model.layouts) == (embedding is not None)
