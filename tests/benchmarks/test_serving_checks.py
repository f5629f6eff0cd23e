"""What the soak test calls a fault, and how its client reads answers."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving.checks import completion, faults, percentile
from benchmarks.serving.http_client import Address, Answer, http_request

BODY = completion([1, 2], 2, n=2)


def event(index: int, text: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 4}}
WHOLE = [event(0, "a"), event(1, "b"), event(1, "c", "length"), event(0, "", "length"), USAGE]


def answer(events: list[dict], end: str = "data: [DONE]\n\n", status: int = 200) -> Answer:
    text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + end
    pieces = [text[i : i + 7].encode() for i in range(0, len(text), 7)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    head = f"HTTP/1.1 {status} whatever\r\nTransfer-Encoding: chunked\r\nX-A: b: c\r\n\r\n"
    return Answer.parse(head.encode() + chunked)


def test_a_whole_stream_has_no_fault():
    assert answer(WHOLE).headers["x-a"] == "b: c"
    assert faults(answer(WHOLE), BODY) == []


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (WHOLE[:-1], "usage None"),
        ([*WHOLE[:3], USAGE], "finish reasons of choice 0: []"),
        ([*WHOLE[:4], event(0, "more"), USAGE], "finish reasons of choice 0: ['length']"),
        ([event(0, "", "length"), event(1, "b", "length"), USAGE], "choice 0 has no text"),
        ([event(0, "a", "length"), USAGE], "choices [0] of 2"),
        ([*WHOLE, {"error": {"code": 500}}], "an error event"),
        ([], "choices [] of 2"),
    ],
)
def test_what_is_missing_or_twice_is_a_fault(events, says):
    assert any(says in fault for fault in faults(answer(events), BODY))


def test_a_broken_off_stream_and_a_refusal_are_faults():
    assert "not exactly one [DONE], at the end" in faults(answer(WHOLE, end=""), BODY)
    assert faults(answer([], status=503), BODY)[0].startswith("status 503")
    assert Answer.parse(b"HTTP/1.1 200").status == 0


def test_requests_and_percentiles():
    request = http_request(Address("h", 1), "/x", {"a": "é"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /x HTTP/1.1\r\nHost: h:1\r\n") and json.loads(body) == {"a": "é"}
    assert f"Content-Length: {len(body)}".encode() in head
    assert http_request(Address("h", 1), "/x").startswith(b"GET ")
    assert [percentile(range(100), q) for q in (0, 0.5, 0.99, 1)] == [0, 50, 99, 99]
