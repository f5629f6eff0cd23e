"""The deployment of docs/clients.md on a Ray of its own, which takes a while to come up: only where one is installed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.clients.snippets import interpreter, run, snippets
from tests.tiny_llm import ids, oracle_greedy, tiny_llm_dir

DRIVER = """
import json, socket, sys

import httpx, ray
from ray import serve

import example

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
serve.start(http_options={"port": port})
serve.run(example.app)
url, body = f"http://127.0.0.1:{port}/v1/completions", json.loads(sys.argv[2])
answer = httpx.post(url, json=body, timeout=100)
with httpx.stream("POST", url, json=body | {"stream": True}, timeout=100) as stream:
    lines = list(stream.iter_lines())
refused = httpx.post(url, json=body | {"model": "another"})
print(json.dumps([answer.json(), lines, refused.status_code]))
serve.shutdown()
ray.shutdown()
"""


def test_the_deployment_answers(tmp_path: Path):
    python = interpreter("ray")
    _, text = snippets()["ray-serve"]
    text = text.replace('"num_gpus": 1', '"num_gpus": 0')
    text = text.replace('"smollm2-135m"', repr(str(tiny_llm_dir())))
    (tmp_path / "example.py").write_text(text)
    (tmp_path / "driver.py").write_text(DRIVER)
    body = dict(prompt="The quick brown fox", max_tokens=6, temperature=0, ignore_eos=True)
    body |= dict(return_token_ids=True)
    more = {"RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    # The names of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        command = [python, "driver.py", short, json.dumps(body)]
        printed = run(command, tmp_path, more)
    [found] = [line for line in printed.splitlines() if line.startswith("[{")]
    answer, lines, refused = json.loads(found)
    [choice] = answer["choices"]
    assert choice["token_ids"] == oracle_greedy(ids("The quick brown fox"), 6)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert lines[-2] == "data: [DONE]" and refused == 404
