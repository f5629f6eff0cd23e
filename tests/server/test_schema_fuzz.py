"""Schemathesis reads the server's own OpenAPI schema and sends what follows from it, right and wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.frontend.story_engine import TOKENIZER
from tests.server.server_process import ROOT, server_process

MAIN = str(Path(__file__).with_name("story_serve_main.py"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def test_whatever_the_schema_allows_is_answered_as_it_says(tmp_path):
    pytest.importorskip("schemathesis")
    TOKENIZER.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with server_process([MAIN, "story", str(tmp_path), "--max-model-len", "200"]) as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "1"),
                *("--checks", CHECKS, "--request-timeout", "30"),
            ],
            cwd=ROOT,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        answer = httpx.post(f"{server.url}/v1/completions", json=dict(prompt="once"))
        assert answer.status_code == 200
        assert server.stop() == 0
