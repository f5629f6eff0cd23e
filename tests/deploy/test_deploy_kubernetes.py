"""The Kubernetes manifest: valid by Kubernetes' schemas, and in agreement with the image and the server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.clients.snippets import interpreter
from tests.deploy.test_deploy_images import DOCKERFILE, serve_flags
from tests.server.story_server import StoryServer, run

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "jaxinfer.yaml"
OBJECTS: dict[str, Any] = {o["kind"]: o for o in yaml.safe_load_all(MANIFEST.read_text())}
POD = OBJECTS["Deployment"]["spec"]["template"]
SPEC = POD["spec"]
[SERVER] = SPEC["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def image(instruction: str) -> str:
    """What the last one of the Dockerfile says."""
    return re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)[-1]


VALIDATE = """
import sys
import kubernetes_validate, yaml
text = sys.stdin.read()
for found in yaml.safe_load_all(text):
    kubernetes_validate.validate(found, "1.32", strict=True)
for found in yaml.safe_load_all(text.replace("livenessProbe", "liveProbe")):
    try:
        kubernetes_validate.validate(found, "1.32", strict=True)
    except kubernetes_validate.ValidationError:
        print("A misspelt", found["kind"], "is found")
"""


def test_kubernetes_own_schemas_agree():
    python = interpreter("kubernetes_validate")
    done = subprocess.run(
        [python, "-c", VALIDATE], input=MANIFEST.read_text(), capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.stdout == "A misspelt Deployment is found\n", done.stderr


def test_the_arguments_are_a_command_line():
    flags = serve_flags([*json.loads(image("ENTRYPOINT"))[1:], *SERVER["args"]])
    assert flags.port == SERVER["ports"][0]["containerPort"] == int(image("EXPOSE"))
    sleep, seconds = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert SPEC["terminationGracePeriodSeconds"] >= int(seconds) + flags.shutdown_timeout + 15
    # A dead engine is seen by the probe, unless the server would see to it itself.
    assert not flags.restart_engine
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(flags.port)


def test_probes_and_scrapers_ask_what_is_answered_without_a_key():
    paths = {SERVER[probe]["httpGet"]["path"] for probe in PROBES}
    paths.add(POD["metadata"]["annotations"]["prometheus.io/path"])

    async def use(server: StoryServer):
        return [(await server.http.get(path)).status_code for path in paths]

    assert run(use, dict(api_key=("secret",))) == [200] * len(paths)
    assert {SERVER[probe]["httpGet"]["port"] for probe in PROBES} == {SERVER["ports"][0]["name"]}
    startup = SERVER["startupProbe"]
    patience = image("HEALTHCHECK").partition("--start-period=")[2].partition("m")[0]
    assert startup["periodSeconds"] * startup["failureThreshold"] == int(patience) * 60


def test_the_user_and_the_volume_are_the_images():
    assert str(SPEC["securityContext"]["runAsUser"]) == image("USER")
    assert SPEC["securityContext"]["fsGroup"] == SPEC["securityContext"]["runAsGroup"]
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert mounts == {"data": image("VOLUME"), "tmp": "/tmp"}
    assert {volume["name"] for volume in SPEC["volumes"]} == set(mounts)
    claim = SPEC["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert SERVER["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_service_finds_the_pods():
    labels = POD["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == SERVER["ports"][0]["name"]
