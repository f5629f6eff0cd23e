"""A prompt one token longer than a block multiple, repeated, with a prefix hit of exactly its full blocks."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.messages import EngineCoreRequest
from jaxinfer.sampling_params import SamplingParams
from tests.core_harness import tiny_core

BLOCK = 4


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_full_blocks_are_found_and_the_answer_stays(num_blocks: int) -> None:
    prompt = np.random.default_rng(3).integers(3, 97, size=num_blocks * BLOCK + 1).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with tiny_core(block_size=BLOCK) as core:

        def ask(prompt: list[int]) -> tuple[int, list[int]]:
            core.add_request(EngineCoreRequest("x", prompt, params, 0.0))
            outputs = []
            while core.has_unfinished():
                outputs.append(core.step())
            (admission,) = [a for o in outputs for a in o.first_scheduled]
            return admission.num_cached_tokens, [t for o in outputs for t in o.token_ids]

        (none, answer), *again = [ask(prompt) for _ in range(3)]
        assert none == 0 and len(answer) == 6
        assert again == [(num_blocks * BLOCK, answer)] * 2
        # Of a prompt that ends with the block, the last token is still to be computed.
        assert ask(prompt[:-1])[0] == (num_blocks - 1) * BLOCK
        core.reset_prefix_cache()
        assert ask(prompt) == (0, answer)
