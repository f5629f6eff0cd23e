"""`get_metrics`: what happened, in Python and over HTTP alike."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.messages import EngineCoreOutputs
from jaxinfer.engine.stats import SchedulerStats
from jaxinfer.frontend.metrics import EngineMetrics
from jaxinfer.metrics import Counter, Gauge, Histogram
from tests.engine.fake_requests import make_config
from tests.frontend.story_engine import story_engine
from tests.server.story_server import StoryServer, run

TEXT = "/v1/completions"


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


def test_what_happens_to_some_requests_only():
    """Preempted, found in the prefix cache, turned away, of several outputs."""

    async def use(server: StoryServer):
        shared = dict(prompt="once upon a time there was", max_tokens=60, ignore_eos=True)
        answers = await asyncio.gather(*(server.ok(TEXT, **shared) for _ in range(3)))
        answers.append(await server.ok(TEXT, **shared | {"n": 2, "max_tokens": 7}))
        await server.refused(TEXT, 503, **shared | {"n": 9})
        await server.until_idle()
        details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
        return sum(d["cached_tokens"] for d in details), server.llm.get_metrics()

    cached, snapshot = run(use, dict(max_num_queued_reqs=0), num_blocks=30, max_model_len=100)
    found = {(m.name.removeprefix("jaxinfer:"), *list(m.labels.values())[2:]): m for m in snapshot}
    assert cached > 0
    assert found["prompt_tokens_by_source", "local_cache_hit"].value == cached
    assert found["prompt_tokens_by_source", "local_compute"].value == 4 * 26 - cached
    assert found["admission_rejections", "max_num_queued_reqs"].value == 1
    preempted = found["request_num_preemptions",]
    assert preempted.sum == found["num_preemptions",].value > 0
    assert preempted.count == 4 and preempted.buckets["0.0"] < 4
    longest = found["request_max_num_generation_tokens",]
    assert (longest.count, longest.sum) == (4, 3 * 60 + 7)
    assert found["request_generation_tokens",].sum == 3 * 60 + 2 * 7


def test_waiting_requests_by_reason_add_up():
    config = make_config()
    metrics = EngineMetrics(config, lambda: 1, None)
    metrics.step(EngineCoreOutputs(stats=SchedulerStats(num_waiting=5, num_deferred=2)))
    found = {(m.name, m.labels.get("reason")): m for m in metrics.snapshot()}
    by_reason = [
        found["jaxinfer:num_requests_waiting_by_reason", reason].value
        for reason in ("capacity", "deferred")
    ]
    assert by_reason == [3, 2] and found["jaxinfer:num_requests_waiting", None].value == 5
