"""What an 8-bit KV cache costs a trained model: the likelihood of a text."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams

TEXT = (
    "The Thames rises in Gloucestershire and flows east through Oxford, Reading and London before it reaches the North "
    "Sea. Below Teddington the river is tidal: twice a day the water turns and runs back towards the hills. In the "
    "nineteenth century the city's sewage went straight into it, until the summer of 1858, when the smell became so bad "
    "that Parliament voted the money for a new system of sewers. Joseph Bazalgette, the engineer, made the pipes twice as "
    "wide as they needed to be. They are still in use today, and salmon have been seen in the river again."
)


@pytest.mark.real
def test_likelihood_of_a_text_hardly_changes():
    """The mean over 124 tokens; single ones move by more, either way."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    loss = {}
    for name in ("auto", "fp8", "int8"):
        llm = LLM("smollm2-135m", kv_cache_dtype=name, max_model_len=256, max_num_seqs=2)
        (output,) = llm.generate(TEXT, params)
        llm.shutdown()
        scores = [
            entry[token].logprob
            for token, entry in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]
        loss[name] = -np.mean(scores)
    assert 1 < loss["auto"] < 4
    assert abs(loss["fp8"] - loss["auto"]) < 0.03
    assert abs(loss["int8"] - loss["auto"]) < 0.03
