"""`deploy/` asks Prometheus only for what `/metrics` says; promtool checks rules and their tests where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.story_server import StoryServer
from tests.server.story_server import run as run_server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_:]*jaxinfer[a-zA-Z0-9_:]*|jaxinfer:[a-zA-Z0-9_:]+")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"")
_TARGET_LABELS = {"job", "instance"}
"""Prometheus' own."""


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """By name of a sample: its labels."""

    async def use(server: StoryServer):
        await server.ok("/v1/completions", prompt="once", max_tokens=3)
        return (await server.http.get("/metrics")).text

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(run_server(use)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict]:
    board = json.loads((DEPLOY / "grafana" / "jaxinfer.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def check_names(expression: str, exposed: dict[str, set[str]], recorded: set[str]) -> None:
    names = set(_NAME.findall(re.sub(r'"[^"]*"', '""', expression)))
    assert names, expression
    assert names <= exposed.keys() | recorded, expression
    labels = set().union(*(exposed.get(name, set()) for name in names)) | _TARGET_LABELS
    assert set(_MATCHER.findall(expression)) <= labels, expression


def test_rules_use_metrics_that_exist(exposed):
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        check_names(rule["expr"].replace("up{", "jaxinfer:engine_up{"), exposed, recorded)
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert {"JaxinferDown", "JaxinferQueueDeep", "JaxinferLatencyHigh"} <= set(alerts)
    assert all(rule["annotations"]["description"] for rule in alerts.values())


def test_names_that_do_not_exist_are_found(exposed):
    with pytest.raises(AssertionError):
        check_names("rate(jaxinfer:requests_total[5m])", exposed, set())
    with pytest.raises(AssertionError):
        check_names('jaxinfer:engine_up{pod="x"}', exposed, set())


def test_the_dashboard_uses_metrics_that_exist(exposed):
    for panel in panels():
        assert panel["targets"]
        for target in panel["targets"]:
            check_names(target["expr"], exposed, set())
    board = json.loads((DEPLOY / "grafana" / "jaxinfer.json").read_text())
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            check_names(variable["query"]["query"], exposed, set())


def test_the_dashboards_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    board = json.loads((DEPLOY / "grafana" / "jaxinfer.json").read_text())
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(
    "command",
    ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"],
)
def test_promtool_agrees(command):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run(
        [promtool, *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_expressions_parse(tmp_path):
    """As rules, which promtool reads."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    made = [
        {"record": f"panel:{i}", "expr": e.replace("$__rate_interval", "5m")}
        for i, e in enumerate(expressions)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
