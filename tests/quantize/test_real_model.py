"""On the first layers of SmolLM2, searched scales beat rounding to the nearest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from benchmarks.perplexity import TEXT
from jaxinfer.frontend.tokenizer import Tokenizer
from jaxinfer.quantize.options import QuantizeOptions
from jaxinfer.quantize.run import quantize
from jaxinfer.weights.gguf import GGUFReader
from tests.quantize.unpacked import dequantized, read_tensors

NUM_LAYERS, NUM_TOKENS = 2, 256


@pytest.fixture(scope="module")
def first_layers(smollm2_gguf, tmp_path_factory) -> Path:
    """A checkpoint of the first layers, with the norm and the head that follow the last."""
    reader, out = GGUFReader(smollm2_gguf), tmp_path_factory.mktemp("smollm2") / "model"
    out.mkdir()
    kept = [name for name in reader.names() if _layer(name) < NUM_LAYERS]
    save_file({name: reader.read(name) for name in kept}, out / "model.safetensors")
    config = {**reader.config(), "num_hidden_layers": NUM_LAYERS, "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config))
    Tokenizer.from_gguf(smollm2_gguf).save(out)
    return out


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


@pytest.mark.real
def test_searches_beat_rounding(first_layers, tmp_path):
    ids = Tokenizer.from_directory(first_layers).encode(TEXT.read_text("utf-8"))[:NUM_TOKENS]
    expected = log_probabilities(first_layers, read_tensors(first_layers), ids)
    losses = {}
    for search in (False, True):
        settings = QuantizeOptions(search=search, num_samples=4, sample_length=128)
        out = quantize(str(first_layers), tmp_path / str(search), settings)
        config = json.loads((out / "config.json").read_text())
        assert config["quantization_config"]["group_size"] == 64
        found = log_probabilities(first_layers, dequantized(out), ids)
        losses[search] = float((expected.exp() * (expected - found)).sum(-1).mean())
    assert losses[True] < 0.9 * losses[False], losses


def log_probabilities(
    directory: Path, tensors: dict[str, np.ndarray], ids: list[int]
) -> torch.Tensor:
    """[T, V], by transformers in float32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(np.array(x, np.float32)) for name, x in tensors.items()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    model.tie_weights()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
