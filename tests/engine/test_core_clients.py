"""Outputs are split between clients without a loss: what they get, put together, is what the core said."""

from __future__ import annotations

import msgspec
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.core_clients import CoreClients
from jaxinfer.engine.ipc import FromCore, Outputs
from jaxinfer.engine.messages import (
    Admission,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from jaxinfer.engine.stats import SchedulerStats

DECODER = msgspec.msgpack.Decoder(FromCore)


class Wire:
    """Clients 0, 1 and 2, and what has come to each."""

    def __init__(self, context: zmq.Context) -> None:
        self.sockets = []
        for client in range(3):
            socket = context.socket(zmq.PULL)
            socket.bind(f"inproc://{id(self)}-{client}")
            self.sockets.append(socket)
        self.clients = CoreClients(context, f"inproc://{id(self)}-0")
        for client in (1, 2):
            self.clients.attach(client, f"inproc://{id(self)}-{client}")

    def read(self, client: int) -> list[Outputs]:
        found = []
        while self.sockets[client].poll(0):
            found.append(DECODER.decode(self.sockets[client].recv()))
        return found

    def close(self, context: zmq.Context) -> None:
        context.destroy(0)


def logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-0.5], 1)


steps = st.lists(
    st.tuples(
        st.integers(0, 3), st.booleans(), st.sampled_from([None, FinishReason.STOP]), st.booleans()
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), steps, st.booleans())
def test_every_client_gets_its_own(owners, rows, is_flat):
    """`rows`: per request, how many tokens, whether they have logprobs, how it ends, and whether it is new."""
    context = zmq.Context()
    wire = Wire(context)
    expected: dict[int, dict[str, tuple]] = {0: {}, 1: {}, 2: {}}
    outputs = EngineCoreOutputs(num_tokens=None if is_flat else [], timestamp=1.5)
    for i, (count, has_logprobs, end, is_new) in enumerate(rows):
        name, count = f"r{i}", 1 if is_flat else count
        assert wire.clients.expect(owners[i], name)
        tokens = [10 * i + j for j in range(count)]
        outputs.request_ids.append(name)
        if outputs.num_tokens is not None:
            outputs.num_tokens.append(count)
        for token in tokens:
            if has_logprobs:
                outputs.logprobs[len(outputs.token_ids)] = logprobs(token)
            outputs.token_ids.append(token)
        if end is not None:
            outputs.finished.append(FinishedRequest(name, end))
        if is_new:
            outputs.first_scheduled.append(Admission(name, 0.5))
            outputs.prompt_logprobs[name] = [logprobs(i)]
            outputs.num_drafted[name] = (2, i)
        expected[owners[i]][name] = (
            tokens,
            [t for t in tokens if has_logprobs],
            end,
            is_new,
        )
    outputs.stats = SchedulerStats(num_running=len(rows))
    wire.clients.send_outputs(outputs)
    for client in range(3):
        messages = wire.read(client)
        assert len(messages) == (1 if expected[client] or client == 0 else 0)
        if not messages:
            continue
        part = messages[0].outputs
        assert part.timestamp == 1.5
        assert (part.stats is not None) == (client == 0)
        assert part.request_ids == list(expected[client])
        start = 0
        for j, name in enumerate(part.request_ids):
            tokens, with_logprobs, end, is_new = expected[client][name]
            stop = start + (1 if part.num_tokens is None else part.num_tokens[j])
            assert part.token_ids[start:stop] == tokens
            known = [
                part.logprobs[k].token_ids[0] for k in range(start, stop) if k in part.logprobs
            ]
            assert known == with_logprobs
            assert [f.reason for f in part.finished if f.request_id == name] == [end] * (
                end is not None
            )
            assert [a.scheduled for a in part.first_scheduled if a.request_id == name] == [
                0.5
            ] * is_new
            assert (name in part.prompt_logprobs) == (name in part.num_drafted) == is_new
            start = stop
        assert start == len(part.token_ids)
    wire.close(context)


def test_a_batch_that_stays_the_same_is_named_once():
    context = zmq.Context()
    wire = Wire(context)
    ids = ["a", "b", "c"]
    for client, name in enumerate(ids):
        wire.clients.expect(client, name)
    for step in range(3):
        wire.clients.send_outputs(EngineCoreOutputs(ids, [step, 10 + step, 20 + step]))
    for client, name in enumerate(ids):
        first, *later = wire.read(client)
        assert (first.outputs.request_ids, first.same_ids) == ([name], False)
        assert [(m.outputs.request_ids, m.same_ids) for m in later] == [([], True)] * 2
        assert [m.outputs.token_ids for m in (first, *later)] == [
            [10 * client + i] for i in range(3)
        ]
    wire.close(context)


def test_a_client_that_is_gone_leaves_its_requests_to_be_aborted():
    context = zmq.Context()
    wire = Wire(context)
    for client, name in ((1, "a"), (2, "b"), (1, "c"), (1, "d")):
        wire.clients.expect(client, name)
    wire.clients.forget(["c"])
    assert sorted(wire.clients.detach(1)) == ["a", "d"]
    assert wire.clients.detach(1) == []
    assert not wire.clients.expect(1, "late")
    assert list(wire.clients.num_received) == [0, 2]
    # A step that was under way.
    wire.clients.send_outputs(EngineCoreOutputs(["a", "b", "d"], [1, 2, 3]))
    assert wire.read(1) == wire.read(0) == []
    [message] = wire.read(2)
    assert (message.outputs.request_ids, message.outputs.token_ids) == (["b"], [2])
    wire.close(context)
