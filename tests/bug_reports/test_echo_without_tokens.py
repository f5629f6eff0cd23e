"""Echo with max_tokens=0 returns the prompt's logprobs; without echo it is refused."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np

from jaxinfer import AsyncLLM
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from tests.tiny_llm import SMALL, ids, oracle_logits, tiny_llm_dir

PROMPT = "To be, or not"


def test_scoring_a_prompt_without_generating():
    async def use():
        llm = AsyncLLM(str(tiny_llm_dir()), dtype="float32", **SMALL)
        try:
            app = build_app(llm, ServerSettings(served_model_name=("tiny",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
                body = dict(model="tiny", prompt=PROMPT, max_tokens=0, logprobs=2)
                return [
                    await http.post("/v1/completions", json=body | dict(echo=echo))
                    for echo in (True, False)
                ]
        finally:
            llm.shutdown()

    scored, refused = asyncio.run(use())
    assert scored.status_code == 200, scored.text
    [choice] = scored.json()["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    tokens = ids(PROMPT)
    logits = oracle_logits(tokens)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    np.testing.assert_allclose(rest, [expected[i, t] for i, t in enumerate(tokens[1:])], atol=1e-4)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
