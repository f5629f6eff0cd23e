"""Figures of synthetic timelines against sums written out; arrivals against their distribution."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import scipy.stats

from jaxinfer.bench.arrivals import arrival_times
from jaxinfer.bench.options import Traffic
from jaxinfer.bench.plot import write_plot
from jaxinfer.bench.report import limits, percentile_list, summarize, text_of
from jaxinfer.bench.timeline import Timeline, max_concurrency

PERCENTILES = [50, 90, 99]


def timeline(rng, num_tokens):
    start = 100 + 10 * rng.random()
    times = start + np.cumsum(rng.exponential(0.05, size=num_tokens))
    return Timeline(start, int(rng.integers(1, 50)), num_tokens, times.tolist(), "x" * num_tokens)


def test_figures_of_random_timelines():
    rng = np.random.default_rng(0)
    timelines = [timeline(rng, n) for n in rng.integers(1, 20, size=200).tolist()]
    assert any(t.num_output_tokens == 1 for t in timelines)
    failed = [Timeline(100, 7, error="HTTP 500"), Timeline(101, 7, 3, [101.1], error="broke off")]
    slos = {"ttft": 60.0, "tpot": 55.0, "e2el": 700.0}
    figures = summarize([*timelines, *failed], 12.5, PERCENTILES, slos)

    ttfts, e2els, tpots, itls, good = [], [], [], [], 0
    for t in timelines:
        first, last, n = t.token_times[0], t.token_times[-1], len(t.token_times)
        ttft, e2el = 1e3 * (first - t.start), 1e3 * (last - t.start)
        tpot = 1e3 * (last - first) / (n - 1) if n > 1 else 0.0
        good += ttft <= 60 and e2el <= 700 and tpot <= 55
        ttfts.append(ttft)
        e2els.append(e2el)
        itls += [1e3 * (t.token_times[i + 1] - t.token_times[i]) for i in range(n - 1)]
        if n > 1:
            tpots.append(tpot)
    assert 0 < good < 200
    for name, values in (("ttft", ttfts), ("e2el", e2els), ("tpot", tpots), ("itl", itls)):
        assert figures[f"mean_{name}_ms"] == pytest.approx(sum(values) / len(values))
        assert figures[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert figures[f"std_{name}_ms"] == pytest.approx(np.std(values))
        ordered = sorted(values)
        for p in PERCENTILES:  # linear between the two nearest ranks
            at = p / 100 * (len(ordered) - 1)
            low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
            expected = low + (high - low) * (at - math.floor(at))
            assert figures[f"p{p}_{name}_ms"] == pytest.approx(expected)
    num_output = sum(len(t.token_times) for t in timelines)
    num_prompt = sum(t.num_prompt_tokens for t in timelines)
    assert (figures["completed"], figures["failed"]) == (200, 2)
    assert figures["total_input_tokens"] == num_prompt
    assert figures["total_output_tokens"] == num_output
    assert figures["request_throughput"] == 200 / 12.5
    assert figures["request_goodput"] == good / 12.5
    assert figures["output_throughput"] == num_output / 12.5
    assert figures["total_token_throughput"] == (num_output + num_prompt) / 12.5
    moments = [t.start for t in timelines]
    at_once = max(sum(t.start <= m < t.end for t in timelines) for m in moments)
    assert figures["max_concurrent_requests"] == at_once
    text = text_of(figures, PERCENTILES)
    assert f"{figures['p99_itl_ms']:.2f}" in text and "good requests" in text


def test_tokens_of_one_piece_share_its_time_in_tpot():
    """vLLM's definitions: TPOT divides by the server's tokens, ITL is between pieces."""
    several = Timeline(0.0, 1, 5, [1.0, 3.0])
    assert several.tpot == 0.5 and several.itls == [2.0]


def test_figures_without_a_request_that_succeeded():
    figures = summarize([Timeline(0.0, error="no")], 1.0, PERCENTILES, {"ttft": 1.0})
    assert figures["completed"] == 0 and figures["failed"] == 1
    assert figures["mean_ttft_ms"] is None and figures["request_goodput"] == 0
    assert "-" in text_of(figures, PERCENTILES)


def test_requests_that_follow_each_other_are_not_at_once():
    chain = [Timeline(float(i), token_times=[float(i + 1)]) for i in range(5)]
    assert max_concurrency(chain) == 1 and max_concurrency([]) == 0


@pytest.mark.parametrize("texts", [["ttft"], ["itl:5"], ["ttft:x"], ["e2el:-1"], ["ttft:nan"]])
def test_limits_that_are_none(texts):
    with pytest.raises(ValueError, match="goodput must be NAME:MILLISECONDS"):
        limits("goodput", texts)


def test_limits_and_percentiles():
    assert limits("goodput", ["ttft:200", "tpot:5.5"]) == {"ttft": 200, "tpot": 5.5}
    assert percentile_list("50,99.9") == [50, 99.9]
    for text in ("", "101", "a"):
        with pytest.raises(ValueError, match="metric_percentiles"):
            percentile_list(text)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_arrivals_are_gamma_distributed(burstiness):
    times = arrival_times(4000, 20.0, burstiness, np.random.default_rng(3))
    intervals = np.diff([0.0, *times])
    expected = scipy.stats.gamma(burstiness, scale=1 / (20 * burstiness))
    assert scipy.stats.kstest(intervals, expected.cdf).pvalue > 0.01
    assert np.mean(intervals) == pytest.approx(1 / 20, rel=0.08)
    variation = np.std(intervals) / np.mean(intervals)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.08)
    assert np.all(intervals >= 0)


def test_poisson_arrivals_count_as_such():
    """The number in a second has mean and variance of the rate."""
    times = arrival_times(20000, 10.0, 1.0, np.random.default_rng(4))
    counts = np.bincount(np.floor(times).astype(int))[:-1]
    assert np.mean(counts) == pytest.approx(10, rel=0.05)
    assert np.var(counts) == pytest.approx(10, rel=0.15)


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_rate", 0),
        ("request_rate", math.nan),
        ("burstiness", 0),
        ("burstiness", math.inf),
        ("max_concurrency", 0),
        ("num_warmups", -1),
    ],
)
def test_traffic_that_can_not_be(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        Traffic(**{field: value})


def test_the_plot_is_an_svg_with_a_line_per_request(tmp_path):
    rng = np.random.default_rng(0)
    timelines = [timeline(rng, n) for n in (1, 5, 9)]
    write_plot(tmp_path / "made" / "plot.svg", timelines, "a & b")
    root = ET.parse(tmp_path / "made" / "plot.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    grey = [e for e in root.iter(f"{space}line") if e.get("stroke") == "#c7c7c7"]
    assert len(grey) == 3 and len(list(root.iter(f"{space}polyline"))) == 4
    widths = [float(e.get("x2")) - float(e.get("x1")) for e in grey]
    waits = [t.ttft for t in sorted(timelines, key=lambda t: t.start)]
    assert np.corrcoef(widths, waits)[0, 1] > 0.99
