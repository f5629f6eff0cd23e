"""`--config`: what stands in the file is as good as typed, and what is typed wins."""

from __future__ import annotations

import pytest

from jaxinfer import cli
from jaxinfer.engine_args import EngineArgs

FILE = """
model: some/model
max-model-len: 2k
gpu_memory_utilization: 0.5
async-scheduling: false
enable-request-id-headers: true
restart-engine: false
hf-overrides: {rope_theta: 5}
served-model-name: [a, b]
api-key: secret
allowed-origins: ["https://x"]
logits-processors: ["mine:boost", "b=mine:ban"]
middleware: ["collections:OrderedDict"]
port: 1234
"""


@pytest.fixture
def served(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxinfer.server.serve.serve", lambda *a: seen.append(a) or 0)
    return seen


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_all_kinds_of_flags(served, written):
    assert cli.main(["serve", "--config", written(FILE)]) == 0
    [(args, settings, listen, _)] = served
    assert args == EngineArgs(
        "some/model",
        max_model_len=2000,
        gpu_memory_utilization=0.5,
        async_scheduling=False,
        hf_overrides={"rope_theta": 5},
        logits_processors={"boost": "mine:boost", "b": "mine:ban"},
        warmup="all",
    )
    assert settings.served_model_name == ("a", "b") and settings.api_key == ("secret",)
    assert settings.enable_request_id_headers and settings.allowed_origins == ("https://x",)
    assert len(settings.middleware) == 1
    assert listen.port == 1234 and not listen.restart_engine


def test_what_is_typed_wins(served, written):
    typed = ["--port", "99", "other/model", "--max-model-len", "64", "--served-model-name", "c"]
    for config in (["--config", written(FILE)], [f"--config={written(FILE)}"]):
        assert cli.main(["serve", *config, *typed, "--async-scheduling"]) == 0
        args, settings, listen, _ = served.pop()
        assert (args.model, args.max_model_len, args.async_scheduling) == ("other/model", 64, True)
        assert settings.served_model_name == ("c",) and listen.port == 99
        assert args.gpu_memory_utilization == 0.5, "and the rest is from the file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 5", "there is no flag --max-modle-len"),
        ("config: x", "there is no flag --config"),
        ("port: many", "argument --port: invalid int value: 'many'"),
        ("warmup: maybe", "argument --warmup: invalid choice: 'maybe'"),
        ("restart-engine: 1", "--restart-engine must be true or false, got 1"),
        ("port: true", "--port needs a value, got True"),
        ("host:", "--host needs a value, got None"),
        ("model: 3", "model must be a string, got 3"),
        ("- port", "must map the names of flags to their values"),
        ("port: [1", "is no valid YAML"),
        ("max-num-seqs: -1", "max_num_seqs must be at least 1"),
    ],
)
def test_what_the_file_may_not_hold(served, written, capsys, text, message):
    assert cli.main(["serve", "m", "--config", written(text)]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not served


def test_a_model_is_still_needed_and_the_file_too(served, written, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--config", written("port: 3")])
    assert "required: model" in capsys.readouterr().err
    assert cli.main(["serve", "m", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_an_empty_file_and_required_flags(served, written, tmp_path, capsys):
    assert cli.main(["serve", "m", "--config", written("")]) == 0
    assert served[0][0] == EngineArgs("m", warmup="all")
    with pytest.raises(SystemExit):
        cli.main(["run-batch", "-o", "x", "--config", written("model: m")])
    err = capsys.readouterr().err
    assert "-i/--input-file" in err and "--model" not in err.splitlines()[-1]
    missing = str(tmp_path / "in.jsonl")
    config = written(f"model: m\ninput-file: {missing}\noutput-file: x")
    assert cli.main(["run-batch", "--config", config]) == 2
    assert f"input_file: there is no file {missing}" in capsys.readouterr().err
