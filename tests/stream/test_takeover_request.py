"""Requests to take over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import cancel_takeover, read_request, request_takeover
from tests.stream.streams import Writer


def is_requested(storage: Storage, head: Manifest | None, last_sign: float = 0.0) -> bool:
    return read_request(storage, head, last_sign) is not None


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
    assert cancel_takeover(storage)
    assert not is_requested(storage, log.head())
    assert not cancel_takeover(storage)


def test_a_request_lapses_when_the_publisher_leaves_a_sign_of_life_unless_it_is_forced(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri())
    head = Writer(storage).snapshot()
    path = tmp_path / "control" / "takeover.json"
    for force in (False, True):
        request_takeover(storage, head, force=force)
        os.utime(path, (1000.0, 1000.0))
        assert is_requested(storage, head, last_sign=999.9)
        assert [is_requested(storage, head, last_sign=sign) for sign in (1000.0, 1000.1)] == [force, force]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 10_000, b" " * 20_000, b'{"stream": 1, "generation": -1, "time": 0}']
)
def test_a_malformed_request_is_ignored(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    storage = Storage("memory://")
    head = Writer(storage).snapshot()
    storage.replace("control/takeover.json", content)
    assert not is_requested(storage, head)
    assert "ignored malformed request" in caplog.text
