"""The example on the page for people who use the kernels alone runs as it stands."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ragged_paged_attention.md"


def test_example_runs_and_merges():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    # The new token of request 0 sees 19 empty slots and itself; the first of request 1 sees itself alone.
    own = np.asarray(names["v_tkh"][1, 0], np.float32)
    np.testing.assert_array_equal(np.asarray(names["out_tnh"][1, :4], np.float32), [own] * 4)
    ones, twos = jnp.ones((1, 1, 2)), jnp.full((1, 1, 2), 2.0)
    lse = jnp.zeros((1, 1))
    merged, merged_lse = names["merge"](ones, lse, twos, lse)
    np.testing.assert_allclose(merged, 1.5 * ones)
    np.testing.assert_allclose(merged_lse, np.log(2) * np.ones((1, 1)), rtol=1e-6)
