"""Who hears of what an engine core does: each client of the requests that it sent."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import zmq

from jaxinfer.engine.ipc import OWNER, FromCore, Outputs
from jaxinfer.engine.messages import EngineCoreOutputs


class CoreClients:
    """The sockets of all clients. `num_received` counts the requests of each."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], owner_address: str) -> None:
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        self._client_of: dict[str, int] = {}
        self._sent_ids: dict[int, list[str]] = {}
        self._whole: list[str] | None = None
        self._parts: dict[int, _Part] = {}
        self.num_received: dict[int, int] = {}
        self.attach(OWNER, owner_address)

    def attach(self, client: int, address: str) -> None:
        outbox = self._context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.connect(address)
        self._outboxes[client] = outbox
        self.num_received[client] = 0

    def detach(self, client: int) -> list[str]:
        """Returns the ids of its unfinished requests, which nobody waits for."""
        if (outbox := self._outboxes.pop(client, None)) is None:
            return []
        outbox.close(0)
        del self.num_received[client]
        self._sent_ids.pop(client, None)
        orphans = [i for i, owner in self._client_of.items() if owner == client]
        self.forget(orphans)
        return orphans

    def expect(self, client: int, request_id: str) -> bool:
        """Outputs of this request go to `client`. False when that is gone."""
        if client not in self._outboxes:
            return False
        self.num_received[client] += 1
        self._client_of.setdefault(request_id, client)
        return True

    def forget(self, request_ids: Iterable[str]) -> None:
        """They were aborted."""
        for request_id in request_ids:
            self._client_of.pop(request_id, None)

    def send(self, client: int, message: FromCore) -> None:
        if (outbox := self._outboxes.get(client)) is not None:
            outbox.send(self._encoder.encode(message))

    def send_outputs(self, outputs: EngineCoreOutputs) -> None:
        """To every client what concerns its requests."""
        if outputs.is_empty and outputs.stats is None:
            return
        if len(self._outboxes) == 1:
            self._send_outputs(OWNER, outputs)
        else:
            for client, part in self._split(outputs).items():
                self._send_outputs(client, part)
        self.forget(end.request_id for end in outputs.finished)

    def _send_outputs(self, client: int, outputs: EngineCoreOutputs) -> None:
        if client not in self._outboxes:
            return
        ids = outputs.request_ids
        if ids and ids is self._sent_ids.get(client):
            bare = msgspec.structs.replace(outputs, request_ids=[])
            self.send(client, Outputs(bare, same_ids=True))
            return
        self._sent_ids[client] = ids
        self.send(client, Outputs(outputs))

    def _split(self, outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
        if outputs.request_ids is not self._whole:
            self._whole, self._parts = outputs.request_ids, self._group(outputs.request_ids)
        made = {c: part.take(outputs) for c, part in self._parts.items()}

        def of(request_id: str) -> EngineCoreOutputs | None:
            client = self._client_of.get(request_id)
            if client is None:  # aborted, and a step that was under way still names it
                return None
            if client not in made:
                made[client] = EngineCoreOutputs(timestamp=outputs.timestamp)
            return made[client]

        for end in outputs.finished:
            if part := of(end.request_id):
                part.finished.append(end)
        for admission in outputs.first_scheduled:
            if part := of(admission.request_id):
                part.first_scheduled.append(admission)
        for request_id, positions in outputs.prompt_logprobs.items():
            if part := of(request_id):
                part.prompt_logprobs[request_id] = positions
        for request_id, counts in outputs.num_drafted.items():
            if part := of(request_id):
                part.num_drafted[request_id] = counts
        if outputs.stats is not None:
            made.setdefault(OWNER, EngineCoreOutputs(timestamp=outputs.timestamp))
            made[OWNER].stats = outputs.stats
        return made

    def _group(self, request_ids: list[str]) -> dict[int, _Part]:
        parts: dict[int, _Part] = {}
        for index, request_id in enumerate(request_ids):
            client = self._client_of.get(request_id)
            if client is not None:
                part = parts.setdefault(client, _Part([], []))
                part.request_ids.append(request_id)
                part.indices.append(index)
        return parts


class _Part:
    """A client's share of a batch; kept, with its list of ids, as long as the batch stays the same."""

    def __init__(self, request_ids: list[str], indices: list[int]) -> None:
        self.request_ids = request_ids
        self.indices = indices

    def take(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """The tokens of these requests, and their logprobs."""
        part = EngineCoreOutputs(self.request_ids, timestamp=outputs.timestamp)
        if outputs.num_tokens is None:
            chosen = self.indices
        else:
            part.num_tokens = [outputs.num_tokens[i] for i in self.indices]
            starts = _starts(outputs.num_tokens)
            chosen = [t for i in self.indices for t in range(starts[i], starts[i + 1])]
        part.token_ids = [outputs.token_ids[i] for i in chosen]
        if outputs.logprobs:
            part.logprobs = {
                new: outputs.logprobs[old]
                for new, old in enumerate(chosen)
                if old in outputs.logprobs
            }
        return part


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts
