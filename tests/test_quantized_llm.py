"""Quantized checkpoints through `LLM`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxinfer import LLM, LoRARequest, SamplingParams
from tests.tiny_llm import SMALL, copy_of_tiny_llm
from tests.tiny_lora import write_adapter
from tests.weights.quantized_files import FORMATS, write_quantized


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    source = copy_of_tiny_llm(root / "source")
    out = write_quantized(source, root / "int8", FORMATS["int8"])
    write_adapter(root / "adapter", 0)
    for path in source.iterdir():
        for target in (out, out / "dequantized"):
            if not (target / path.name).exists():
                shutil.copy(path, target)
    return out


def tokens_of(directory: Path, adapter_dir: Path, **options: object) -> list[list[int]]:
    """With an adapter, and without."""
    adapter = LoRARequest("adapter", 1, str(adapter_dir))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(directory), enable_lora=True, **SMALL, **options) as llm:
        prompts, adapters = ["The first of two"] * 2, [adapter, None]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_tokens_of_the_dequantized_checkpoint(directory: Path) -> None:
    adapter = directory.parent / "adapter"
    expected = tokens_of(directory / "dequantized", adapter)
    assert expected[0] != expected[1]
    assert tokens_of(directory, adapter, quantization="compressed-tensors") == expected
    assert tokens_of(directory, adapter, dequantize=True) == expected


def test_a_quantization_that_is_not_the_checkpoints_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="is 'awq', but the checkpoint is quantized with 'comp"):
        LLM(str(directory), quantization="awq", **SMALL)
    with pytest.raises(ValueError, match="is 'awq', but the checkpoint is not quantized"):
        LLM(str(directory / "dequantized"), quantization="awq", **SMALL)
    with pytest.raises(ValueError, match=r"quantization must be one of .*'gptq'.* got 'nope'"):
        LLM(str(directory), quantization="nope", **SMALL)
