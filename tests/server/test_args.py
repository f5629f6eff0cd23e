from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from jaxinfer import cli
from jaxinfer.cli_args import engine_args
from jaxinfer.engine_args import EngineArgs
from jaxinfer.server import args as server_args
from jaxinfer.server.args import ListenArgs, add_server_args, listen_args, server_settings
from jaxinfer.server.settings import ServerSettings


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_args(parser)
    return parser.parse_args(flags)


def settings_of(*flags: str) -> ServerSettings:
    return server_settings(parse(*flags), EngineArgs("some/model"))


def test_defaults_are_those_of_the_dataclasses(monkeypatch):
    monkeypatch.delenv(server_args.API_KEY_VARIABLE, raising=False)
    assert listen_args(parse()) == ListenArgs()
    assert settings_of() == ServerSettings(("some/model",))


def test_flags_reach_their_fields(monkeypatch, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}é", encoding="utf-8")
    monkeypatch.setenv(server_args.API_KEY_VARIABLE, "from the environment")
    found = settings_of(
        *("--served-model-name", "a", "b", "--chat-template", str(template)),
        *("--allowed-origins", '["https://x"]', "--default-chat-template-kwargs", '{"k": 1}'),
        *("--max-num-queued-reqs", "7", "--enable-request-id-headers"),
    )
    assert found.served_model_name == ("a", "b") and found.chat_template == "{{ messages }}é"
    assert found.allowed_origins == ("https://x",) and found.enable_request_id_headers
    assert found.default_chat_template_kwargs == {"k": 1} and found.max_num_queued_reqs == 7
    assert found.api_key == ("from the environment",)
    assert settings_of("--api-key", "x", "y").api_key == ("x", "y")
    assert settings_of("--chat-template", "{{ 1 }}").chat_template == "{{ 1 }}"
    listen = listen_args(parse("--host", "0.0.0.0", "--port", "1", "--shutdown-timeout", "0"))
    assert (listen.host, listen.port, listen.shutdown_timeout) == ("0.0.0.0", 1, 0)


def test_certificates_are_refreshed_only_where_there_are_some(tmp_path):
    (tmp_path / "a.pem").touch()
    flags = ("--enable-ssl-refresh", "--ssl-certfile", str(tmp_path / "a.pem"))
    assert listen_args(parse(*flags)).enable_ssl_refresh
    with pytest.raises(ValueError, match="enable_ssl_refresh needs an ssl_certfile"):
        listen_args(parse("--enable-ssl-refresh"))
    with pytest.raises(ValueError, match="max_log_len must be at least 0, got -1"):
        settings_of("--max-log-len", "-1")


@pytest.mark.parametrize(
    "flags", [["--allowed-origins", "*"], ["--port", "x"], ["--uvicorn-log-level", "loud"]]
)
def test_unreadable_flags(flags, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert flags[0] in capsys.readouterr().err


def test_middleware_is_found_in_the_current_directory(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(
        "jaxinfer.server.serve.serve", lambda args, settings, *others: seen.append(settings) or 0
    )
    (tmp_path / "stamps_of_mine.py").write_text(
        "class Stamp: ...\nasync def stamp(request, call_next): ...\ndef plain(): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    flags = ["--middleware", "stamps_of_mine:Stamp", "--middleware", "stamps_of_mine:stamp"]
    assert cli.main(["serve", "m", *flags, "--enable-log-requests"]) == 0
    [settings] = seen
    assert [added.__name__ for added in settings.middleware] == ["Stamp", "stamp"]
    assert settings.enable_log_requests
    for wrong, text in (
        ("stamps_of_mine:plain", "neither a class nor a coroutine function"),
        ("stamps_of_mine", "must have the form MODULE:OBJECT"),
        ("stamps_of_mine:none", "can't import 'stamps_of_mine:none'"),
    ):
        assert cli.main(["serve", "m", "--middleware", wrong]) == 2
        assert text in capsys.readouterr().err


def test_the_development_mode_comes_from_the_environment(monkeypatch):
    for value, mode in ((None, False), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv(server_args.DEV_MODE_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(server_args.DEV_MODE_VARIABLE, value)
        assert settings_of().dev_mode is mode
    monkeypatch.setenv(server_args.DEV_MODE_VARIABLE, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'yes'"):
        settings_of()


def test_serve_compiles_everything_first_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxinfer.server.serve.serve", lambda args, *others: seen.append((args, *others)) or 0
    )
    assert cli.main(["serve", "m", "--served-model-name", "x", "--max-num-seqs", "3"]) == 0
    assert cli.main(["serve", "m", "--warmup", "lazy", "--log-level", "error"]) == 0
    (first, settings, _, _), (second, _, _, command) = seen
    assert first == EngineArgs("m", max_num_seqs=3, warmup="all")
    assert settings.served_model_name == ("x",)
    assert second == EngineArgs("m", warmup="lazy") and command[-1] == "error"
    assert engine_args(argparse.Namespace(model="m")).warmup == "lazy"


def test_the_command_line_loads_no_web_framework():
    code = "import sys, jaxinfer.cli; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"fastapi", "pydantic", "uvicorn", "zmq", "jax"}


def test_the_api_server_loads_no_jax():
    code = (
        "import sys, jaxinfer.server.serve; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "uvicorn" in done.stdout
    assert not set(done.stdout.split()) & {"jax", "jaxlib", "flax", "torch", "transformers"}
