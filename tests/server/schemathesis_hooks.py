"""For schemathesis: of the bodies that it makes, those that are nearly right get past the first field."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Other models are refused before anything is looked at, and of a short `timeout` 504 is the right answer. What
    costs time stays small."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name not in ("model", "timeout")}
    if isinstance(body.get("prompt"), str):
        body["prompt"] = "once upon"
    if body.get("messages"):
        body["messages"] = [{"role": "user", "content": "once"}]
    for name, largest in (("n", 9), ("max_tokens", 40), ("max_completion_tokens", 40)):
        if isinstance(body.get(name), int):
            body[name] %= largest
    return body
