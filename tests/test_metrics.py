"""`get_metrics`: what happened, in Python and over HTTP alike."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import LLM, SamplingParams
from jaxinfer.metrics import Counter, Gauge, Histogram
from tests.frontend.story_engine import story_engine
from tests.server.story_server import StoryServer, run


def test_an_llm_counts_its_requests_over_all_calls():
    engine, _ = story_engine()
    with LLM.from_engine(engine) as llm:
        llm.generate(["a", "abc"], SamplingParams(max_tokens=4), use_tqdm=False)
        llm.generate("ab", SamplingParams(n=2, max_tokens=40, stop="pon"), use_tqdm=False)
        found = {(m.name, m.labels.get("finished_reason")): m for m in llm.get_metrics()}
    assert all(m.labels["model_name"] == "fake" for m in found.values())

    def one(name, reason=None):
        return found["jaxinfer:" + name, reason]

    assert one("prompt_tokens").value == 1 + 3 + 2
    assert one("request_success", "length").value == 2
    assert one("request_success", "stop").value == 2
    assert one("request_success", "abort").value == 0
    assert isinstance(one("prompt_tokens"), Counter)
    assert isinstance(one("num_requests_running"), Gauge)
    assert one("num_requests_running").value == 0
    lengths = one("request_prompt_tokens")
    assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (3, 6)
    assert lengths.buckets["1.0"] == 1 and lengths.buckets["2.0"] == 2
    assert lengths.buckets["+Inf"] == 3
    assert one("time_to_first_token_seconds").count == 4
    assert one("generation_tokens").value >= 4 + 4


def test_python_and_prometheus_read_the_same_numbers():
    async def use(server: StoryServer):
        await server.ok("/v1/completions", prompt=["once", "a"], n=2, max_tokens=9, stop="fox")
        await server.until_idle()
        return server.llm.get_metrics(), (await server.http.get("/metrics")).text

    snapshot, text = run(use)
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("jaxinfer:")
    }
    expected = {}
    for metric in snapshot:
        labels = metric.labels.items()
        if isinstance(metric, Histogram):
            expected[metric.name + "_count", frozenset(labels)] = metric.count
            expected[metric.name + "_sum", frozenset(labels)] = metric.sum
            for bound, count in metric.buckets.items():
                key = metric.name + "_bucket", frozenset([*labels, ("le", bound)])
                expected[key] = count
        else:
            suffix = "_total" if isinstance(metric, Counter) else ""
            expected[metric.name + suffix, frozenset(labels)] = metric.value
    # Python has exceptions for an engine that has died.
    up = frozenset({"model_name": "story", "engine": "0"}.items())
    assert shown == expected | {("jaxinfer:engine_up", up): 1}
