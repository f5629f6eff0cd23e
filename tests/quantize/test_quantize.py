"""`jaxinfer quantize` from one directory to another."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxinfer import LLM, SamplingParams, cli
from jaxinfer.quantize.options import QuantizeOptions
from jaxinfer.quantize.run import quantize
from jaxinfer.weights.safetensors import INDEX_NAME, SafetensorsReader
from tests.quantize.models import make_model, tiny_dir
from tests.quantize.unpacked import dequantized, read_tensors
from tests.tiny_llm import SMALL, TOKENIZER

EMBEDDING = "model.embed_tokens.weight"
ERRORS = {"awq": 0.15, "int8": 0.008, "fp8": 0.03}
"""Root mean square of the rounding, relative to the weights'."""


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("etaoin shrdlu"), 200)))
    return path


def made(name: str, out: Path, **options) -> tuple[Path, dict]:
    quantize(str(tiny_dir(name)), out, QuantizeOptions(**options))
    return out, json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("embedding", [None, "int8"])
@pytest.mark.parametrize("method", ["awq", "int8", "fp8"])
def test_rounded_weights_are_near_the_originals(method, embedding, tmp_path):
    out, config = made("llama", tmp_path / "out", method=method, embedding=embedding, search=False)
    original, found = read_tensors(tiny_dir("llama")), dequantized(out)
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        if "proj" in name:
            error = np.sqrt(np.mean((found[name] - tensor) ** 2) / np.mean(tensor**2))
            assert 1e-4 < error < ERRORS[method], name
        elif name == EMBEDDING and embedding:
            assert np.abs(found[name] - tensor).max() < 0.5 * np.abs(tensor).max() / 120
        else:
            np.testing.assert_array_equal(found[name], tensor)
    quantization = config.pop("quantization_config")
    before = json.loads((tiny_dir("llama") / "config.json").read_text())
    assert config == before
    if (method, embedding) == ("awq", None):
        assert quantization == dict(
            quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
            modules_to_not_convert=["lm_head"],
        )  # fmt: skip
    else:
        assert quantization["quant_method"] == "compressed-tensors"
        assert quantization["ignore"] == ["lm_head"]
        targets = [group["targets"] for group in quantization["config_groups"].values()]
        assert targets == [["Linear"], ["Embedding"]][: 1 + (embedding is not None)]


def test_files_of_bounded_size_have_an_index_and_all_else_comes_along(tmp_path):
    source = shutil.copytree(tiny_dir("llama_biased"), tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "pytorch_model.bin").write_bytes(b"no")
    out = quantize(str(source), tmp_path / "out", QuantizeOptions(search=False), shard_bytes=20_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / INDEX_NAME).read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    reader = SafetensorsReader(out)
    tensors = read_tensors(out)
    assert set(reader.names()) == set(index["weight_map"]) == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    kept = {
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert kept <= {path.name for path in out.iterdir()}
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


@pytest.mark.parametrize("embedding", [None, "int8"])
def test_searched_weights_make_less_of_an_error_than_rounded_ones(embedding, calibration, tmp_path):
    """On another text than the calibration's, by transformers in float64 from the unpacked tensors."""
    errors = {}
    for search in (False, True):
        out, _ = made(
            "uneven", tmp_path / str(search), search=search, embedding=embedding,
            calibration=calibration, num_samples=4, sample_length=40,
        )  # fmt: skip
        errors[search] = logits_error("uneven", out)
    assert errors[True] < 0.9 * errors[False]


def logits_error(name: str, out: Path) -> float:
    """Mean square, against the original's."""
    ids = np.random.default_rng(3).integers(3, 90, (4, 40))
    expected = logits(name, read_tensors(tiny_dir(name)), ids)
    return float(((logits(name, dequantized(out), ids) - expected) ** 2).mean())


def logits(name: str, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Of the model with those tensors, by transformers in float64."""
    model = make_model(name).double()
    state = {key: torch.from_numpy(np.array(x)) for key, x in tensors.items()}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize("embedding", [None, "int8"])
def test_the_engine_computes_what_the_format_means(embedding, tmp_path):
    out, _ = made("llama", tmp_path / "out", search=False, embedding=embedding)
    ids = np.array(TOKENIZER.encode("It is not down in any map."))
    expected = logits("llama", dequantized(out), ids[None])[0]
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(out), **SMALL) as llm:
        [output] = llm.generate([{"prompt_token_ids": ids.tolist()}], params, use_tqdm=False)
    entries = list(output.prompt_logprobs)[1:]
    found = [entry[token].logprob for entry, token in zip(entries, ids[1:].tolist(), strict=True)]
    np.testing.assert_allclose(found, expected[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)


def test_what_is_not_searched_is_rounded_and_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxinfer.quantize"):
        out, _ = made("olmo2", tmp_path / "out")
    assert 'Olmo2ForCausalLM has norms placed "post"' in caplog.text
    plain, _ = made("olmo2", tmp_path / "plain", search=False)
    found = read_tensors(out)
    for key, tensor in read_tensors(plain).items():
        np.testing.assert_array_equal(found[key], tensor)


def test_experts_are_quantized_and_routers_are_not(tmp_path):
    out, config = made("mixtral", tmp_path / "out", search=False)
    original, found = read_tensors(tiny_dir("mixtral")), dequantized(out)
    assert found.keys() == original.keys()
    unchanged = {key for key in original if np.array_equal(found[key], original[key])}
    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    assert unchanged == {
        key for key in original if "norm" in key or "embed" in key or "gate" in key or "lm" in key
    }
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head", *routers]


@pytest.mark.parametrize(
    ("name", "says"),
    [("gpt2", r"stores its matrices \[in, out\]"), ("mamba", "layers with states")],
)
def test_models_that_cannot_be_quantized_are_refused_by_name(name, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        made(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    out, _ = made("llama", tmp_path / "out", search=False)
    with pytest.raises(ValueError, match=r"is quantized already \(quant_method 'awq'\)"):
        quantize(str(out), tmp_path / "again")


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("jaxinfer.quantize.run.write_surroundings", fail)
    with pytest.raises(OSError, match="disk full"):
        made("llama", tmp_path / "out", search=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--group-size", "64"),
            r"group_size 64 does not divide the 96 columns of model.*down_proj",
        ),
        (("--group-size", "16"), "group_size must be one of 128, 64, 32, got 16"),
        (("--group-size", "32", "--method", "int8"), r"group_size \(32\) is of method 'awq'"),
        (("--num-samples", "0"), "num_samples must be at least 1, got 0"),
        (("--calibration", "nowhere.txt"), "calibration: there is no file nowhere.txt"),
        (("--num-samples", "9999"), r"too few for num_samples \(9999\)"),
    ],
)
def test_bad_flags_say_what_is_wrong(flags, says, tmp_path, capsys):
    import re

    code = cli.main(["quantize", str(tiny_dir("llama")), str(tmp_path / "out"), *flags])
    assert code == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_unknown_models_and_methods_and_existing_directories_are_refused(tmp_path, capsys):
    assert cli.main(["quantize", str(tmp_path / "nowhere.gguf"), str(tmp_path / "out")]) == 2
    assert "no such file or directory" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert cli.main(["quantize", str(tiny_dir("llama")), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["quantize", "m", str(tmp_path / "out"), "--method", "gptq"])
    assert "invalid choice: 'gptq'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="method must be one of awq, int8, fp8, got 'gptq'"):
        QuantizeOptions(method="gptq")


def test_the_command_prints_where_the_result_is(tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["quantize", str(tiny_dir("llama")), str(out), "--no-search", "--embedding", "int8"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert (out / "config.json").is_file()
