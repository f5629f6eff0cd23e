"""Requests with adapters over the fake device, which checks at every step that a row has its own adapter's slot, and the
tokens and cached blocks of that adapter."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from jaxinfer.config import LoRAConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.messages import EngineCoreRequest, FinishReason
from jaxinfer.lora_request import LoRARequest
from tests.engine.core_runs import Collected, alone, make_core, run
from tests.engine.fake_executor import FakeExecutor, adapted
from tests.engine.fake_requests import MAX_MODEL_LEN, hashed_token, make_request, speculative

NAMES = "abcdefgh"


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, ord(name), f"/{name}")


def make(max_loras: int = 2, max_cpu: int = 2, **config: object) -> tuple[EngineCore, FakeExecutor]:
    lora = LoRAConfig(max_loras, 8, max_cpu, "float32")
    core, executor = make_core(lora=lora, **config)  # type: ignore[arg-type]
    executor.folders = {f"/{name}": f"content of {name}" for name in NAMES}
    return core, executor


def request(index: int, name: str | None, prompt: list[int] | int = 9, **more) -> EngineCoreRequest:
    lora = None if name is None else adapter(name)
    return make_request(f"{name}{index}", prompt, lora=lora, **{"max_tokens": 5, **more})


def expected(message: EngineCoreRequest, key: str) -> list[int]:
    return alone(message, lambda context: hashed_token(adapted(key, context)))[0]


def check(core: EngineCore, messages: Iterable[EngineCoreRequest]):
    messages = list(messages)
    collected = run(core, messages)
    for message in messages:
        key = "" if message.lora is None else f"content of {message.lora.lora_name}"
        assert collected.tokens[message.request_id] == expected(message, key)
    return collected


@pytest.mark.parametrize("overlap", [True, False])
def test_more_adapters_than_slots_and_host_copies(overlap: bool) -> None:
    core, executor = make(max_loras=2, max_cpu=3, max_num_seqs=8, budget=32, overlap=overlap)
    names = [*NAMES, None, *NAMES, *reversed(NAMES)]
    check(core, (request(i, name) for i, name in enumerate(names)))
    assert max(len(set(plan_adapters(executor, i))) for i in range(len(executor.plans))) <= 2
    assert len(executor.on_host) == 3


def plan_adapters(executor: FakeExecutor, index: int) -> list[int]:
    return [load.slot for load in executor.plans[index].adapters]


def test_what_fits_neither_waits_nor_is_loaded_again() -> None:
    core, executor = make(max_num_seqs=6, budget=64)
    check(core, (request(i, name) for i, name in enumerate("ababab")))
    assert len(executor.plans[0].admitted) == 6
    assert [len(plan.adapters) for plan in executor.plans[:2]] == [2, 0]
    check(core, (request(i, name) for i, name in enumerate("bbaa", 10)))
    assert sum(len(plan.adapters) for plan in executor.plans) == 2 and executor.num_reads == 2


def test_the_slot_used_longest_ago_goes_first() -> None:
    core, executor = make(max_loras=2, max_cpu=8)
    for i, name in enumerate("abac"):
        check(core, [request(i, name)])
    assert set(executor.slots.values()) == {"content of a", "content of c"}
    assert executor.num_reads == 3


def test_others_pass_one_that_waits_for_a_slot_but_not_forever() -> None:
    core, executor = make(max_loras=1, max_num_seqs=4, budget=64, max_overtakes=5)
    core.add_request(request(0, "a"))
    core.add_request(request(0, "b"))
    for i in range(1, 40):  # of lengths that leave no step without any of them
        core.add_request(request(i, "a", max_tokens=3 + i % 4))
    run(core)
    loads = [i for i, plan in enumerate(executor.plans) for _ in plan.adapters]
    assert [executor.plans[i].adapters[0].key[-1] for i in loads] == ["a", "b", "a"]
    assert sum(len(plan.admitted) for plan in executor.plans[: loads[1]]) == 1 + 5


def test_requests_without_an_adapter_pass_one_that_waits() -> None:
    core, executor = make(max_loras=1, max_num_seqs=3, budget=64)
    check(core, [request(0, "a"), request(0, "b"), request(0, None), request(1, None)])
    assert len(executor.plans[0].admitted) == 3


def test_cached_blocks_are_an_adapters_own() -> None:
    core, _ = make(max_loras=2, max_cpu=8, budget=64)
    prompt = list(range(17))
    for i, name in enumerate([None, "a", "b", None, "a", "b"]):
        collected = check(core, [request(i, name, prompt)])
        assert num_cached(collected) == [16 if i >= 3 else 0]


def num_cached(collected: Collected) -> list[int]:
    return [a.num_cached_tokens for o in collected.outputs for a in o.first_scheduled]


def test_another_file_is_another_adapter_whatever_it_is_called() -> None:
    core, executor = make(budget=64)
    prompt = list(range(17))
    before = request(0, "a", prompt)
    check(core, [before])
    executor.folders["/a"] = "something new"
    assert run(core, [request(1, "a", prompt)]).tokens["a1"] == expected(before, "content of a")
    assert core.call("add_lora", "a", ord("a"), "/a") is True
    collected = run(core, [request(2, "a", prompt)])
    assert collected.tokens["a2"] == expected(before, "something new")
    assert num_cached(collected) == [0]
    # The same id with another path.
    moved = make_request("moved", prompt, lora=LoRARequest("a", ord("a"), "/b"), max_tokens=5)
    assert run(core, [moved]).tokens["moved"] == expected(moved, "content of b")


def test_requests_end_with_the_adapter_that_they_began_with() -> None:
    core, executor = make(max_loras=1, max_num_seqs=2)
    messages = [request(i, "a", max_tokens=8) for i in range(3)]
    for message in messages:
        core.add_request(message)
    core.step()
    assert core.call("list_loras") == [("a", ord("a"), "/a")]
    assert core.call("remove_lora", ord("a")) is True
    assert core.call("remove_lora", ord("a")) is False and core.call("list_loras") == []
    executor.folders["/a"] = "something new"
    core.call("add_lora", "a", ord("a"), "/a")
    collected = run(core)
    for message in messages:
        tokens = expected(message, "content of a")
        assert (
            tokens[-len(collected.tokens[message.request_id]) :]
            == collected.tokens[message.request_id]
        )


def test_a_waiting_request_whose_adapter_has_gone_ends_alone() -> None:
    core, executor = make(max_loras=1, max_cpu=1, max_num_seqs=2)
    for name in "ab":
        core.add_request(request(0, name))
    assert executor.on_host == {"content of b"}
    del executor.folders["/a"]
    collected = run(core, [request(1, "b")])
    assert (
        collected.ends["a0"][0] is FinishReason.ERROR and "/a holds no" in collected.ends["a0"][1]
    )
    assert len(collected.tokens["b0"]) == len(collected.tokens["b1"]) == 5
    core.add_request(request(3, "c"))
    core.add_request(request(2, "b"))
    executor.folders["/b"] = "something new"
    collected = run(core)
    assert "has changed since" in collected.ends["b2"][1] and len(collected.tokens["c3"]) == 5


def test_preemption() -> None:
    core, _ = make(max_loras=2, num_blocks=14, max_num_seqs=4, budget=32)
    check(core, (request(i, name, 8, max_tokens=14) for i, name in enumerate("abcab")))


def test_drafts_are_verified_with_the_adapter() -> None:
    core, _ = make(
        max_loras=2, max_num_seqs=4, speculative=speculative(), wrong_guesses=3, budget=32
    )
    messages = [request(i, name, max_tokens=12) for i, name in enumerate(["a", None, "b", "c"])]
    check(core, messages)


def test_pinned_adapters_stay() -> None:
    core, executor = make(max_loras=2, max_cpu=2)
    check(core, [request(0, "a")])
    assert core.call("pin_lora", ord("a")) is True
    for i, name in enumerate("bcdbcd"):
        check(core, [request(i, name)])
    assert "content of a" in executor.slots.values() and "content of a" in executor.on_host
    with pytest.raises(ValueError, match="at most 1 can be pinned"):
        core.call("pin_lora", ord("d"))
    with pytest.raises(ValueError, match="1 is not loaded"):
        core.call("pin_lora", 1)
    core.call("remove_lora", ord("a"))
    for i, name in enumerate("bc"):
        check(core, [request(i, name)])
    assert "content of a" not in executor.slots.values()


def test_slots_are_filled_anew_after_sleep() -> None:
    core, _ = make()
    check(core, [request(0, "a")])
    core.sleep(1)
    core.wake_up()
    check(core, [request(1, "a")])


def test_names_of_adapters_that_run_and_wait() -> None:
    core, _ = make(max_loras=1)
    collected = run(core, [request(0, "a"), request(0, "b")])
    stats = [o.stats for o in collected.outputs if o.stats]
    assert (stats[0].running_adapters, stats[0].waiting_adapters) == (["a"], ["b"])
    assert (stats[-1].running_adapters, stats[-1].waiting_adapters) == ([], [])


def test_bad_input_leaves_the_engine_alive() -> None:
    core, _ = make()
    bad = make_request("bad", lora=LoRARequest("x", 1, "/nowhere"))
    with pytest.raises(ValueError, match="/nowhere holds no adapter"):
        core.add_request(bad)
    assert core.call("list_loras") == [] and not core.has_unfinished()
    check(core, [request(0, "a")])
    plain, _ = make_core()
    for refused in (lambda: plain.add_request(request(0, "a")), lambda: plain.call("list_loras")):
        with pytest.raises(ValueError, match="enable_lora"):
            refused()
    for fields in (("", 1, "/a"), ("a", 0, "/a"), ("a", True, "/a"), ("a", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*fields)


assert MAX_MODEL_LEN >= 8 + 14
