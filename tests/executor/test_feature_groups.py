"""Which variant of the sampler each row takes: the one that it would take alone."""

import numpy as np

from jaxinfer.executor.sampling_rows import SamplingRows
from jaxinfer.sampling_params import SamplingParams

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=50),
    SamplingParams(temperature=1.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={3: 1.0}, logprobs=20),
]


def test_groups_are_disjoint_and_hold_what_a_row_alone_gets():
    rng = np.random.default_rng(0)
    rows = SamplingRows(32, 1000, max_logprobs=100)
    for row in range(32):
        rows.set_row(row, KINDS[row % len(KINDS)], np.arange(4), 4)
    for _ in range(20):
        chosen = rng.permutation(32)[: int(rng.integers(1, 33))]
        samples, masked = rng.random((2, len(chosen))) < 0.6
        seen = np.zeros(len(chosen), int)
        groups = rows.feature_groups(chosen, samples, masked)
        assert len({features for features, _ in groups}) == len(groups)
        for features, members in groups:
            seen += members
            for r in np.flatnonzero(members):
                own = rows.features(chosen[r : r + 1], np.ones(1, bool), masked=bool(masked[r]))
                assert own == features
        assert (seen == samples).all()
