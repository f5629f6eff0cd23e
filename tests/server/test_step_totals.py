"""What `/metrics` says of the engine's steps, against the plans that the fake device was given."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.story_server import StoryServer
from tests.server.story_server import run as run_server


def test_totals_follow_from_the_plans():
    """Memory is read at most once a second: the first step reports it."""

    async def use(server: StoryServer):
        start = time.perf_counter()
        for prompt in ("once upon a time", "abc"):
            await server.ok("/v1/completions", prompt=prompt, max_tokens=6, ignore_eos=True)
        await server.until_idle()
        elapsed = time.perf_counter() - start
        return server.executor, elapsed, (await server.http.get("/metrics")).text

    executor, elapsed, text = run_server(use)
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("jaxinfer:")
            values[name, sample.labels.get("phase")] = sample.value
    plans, costs = executor.plans, executor.step_costs
    assert values["engine_steps_total", None] == len(plans) >= 12
    for field, name in (
        ("flops", "estimated_flops_per_gpu_total"),
        ("read_bytes", "estimated_read_bytes_per_gpu_total"),
        ("write_bytes", "estimated_write_bytes_per_gpu_total"),
        ("roofline_seconds", "roofline_seconds_total"),
    ):
        expected = sum(getattr(costs.work(plan, plan.num_tokens), field) for plan in plans)
        assert values[name, None] == pytest.approx(expected) and expected > 0
    phases = [
        values["step_host_seconds_total", phase]
        for phase in ("schedule", "launch", "wait", "update")
    ]
    assert all(seconds > 0 for seconds in phases) and sum(phases) <= elapsed
    assert values["device_memory_used_bytes", None] == 3000
    assert values["device_memory_limit_bytes", None] == 4000
