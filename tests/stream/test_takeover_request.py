"""Requests to take over."""

from __future__ import annotations

import pytest

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import is_requested, request_takeover
from tests.stream.streams import Writer


def test_a_request_is_for_one_generation() -> None:
    storage = Storage("memory://")
    log, writer = StreamLog(storage), Writer(storage)
    assert not is_requested(storage, log.head())
    request_takeover(storage, writer.snapshot())
    writer.delta([1])
    assert is_requested(storage, log.head())
    Writer(storage)
    assert not is_requested(storage, log.head())
    request_takeover(storage, log.head())
    assert is_requested(storage, log.head())
    other = Writer(Storage("memory://"))
    other.snapshot()
    assert not is_requested(storage, Writer(other.storage).claim.head), "of another stream"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 10_000, b'{"stream": 1, "generation": -1, "time": 0}'])
def test_a_malformed_request_is_ignored(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    storage = Storage("memory://")
    head = Writer(storage).snapshot()
    storage.replace("control/takeover.json", content)
    assert not is_requested(storage, head)
    assert "ignored malformed request" in caplog.text
