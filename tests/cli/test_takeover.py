"""``delta-tracker takeover``."""

from __future__ import annotations

import threading

import pytest

from delta_tracker.cli import takeover
from delta_tracker.stream import takeover_request as stream_takeover
from delta_tracker.stream.heartbeat import Heartbeat, PublisherHeartbeatWriter
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import TakeoverRequest, read_request
from tests.cli.commands import Cli, date, path_of, url_of
from tests.heartbeats import read_heartbeats
from tests.stream.streams import Writer

_REQUEST = "control/takeover.json"


@pytest.fixture
def silent(writer: Writer) -> Writer:
    """A stream whose publisher has committed its last entry 100 s ago."""
    for path in path_of(writer, "log").iterdir():
        date(path, 100)
    return writer


def request_of(writer: Writer) -> TakeoverRequest:
    """Return the request for a takeover from a publisher that has been silent since."""
    request = read_request(writer.storage, writer.claim.head, last_sign=0.0)
    assert request is not None
    return request


def test_a_live_publisher_is_not_replaced_without_force(cli: Cli, silent: Writer) -> None:
    url, head = url_of(silent), silent.claim.head
    PublisherHeartbeatWriter(silent.storage).write(head)
    assert cli("takeover", url, code=2) == ""
    assert "live publisher of generation 1: version 4, last sign" in cli.err
    assert silent.storage.size(_REQUEST) is None
    PublisherHeartbeatWriter(silent.storage, 40.0).write(head)
    cli("takeover", url, code=2)
    assert "Pass more than 40 s, the time between the publisher's heartbeats, or --force" in cli.err
    assert cli.json("takeover", url, "--force")["silent_seconds"] is None
    assert request_of(silent).force


def test_a_silent_publisher_is_named_in_a_request(cli: Cli, silent: Writer) -> None:
    url, head = url_of(silent), silent.claim.head
    cli("takeover", url, "--silence", 200, code=2)
    assert silent.storage.size(_REQUEST) is None
    found = cli.json("takeover", url)
    assert found.pop("silent_seconds") == pytest.approx(100, abs=60)
    expected = {"url": url, "stream": head.stream, "generation": 1, "version": 4, "successor": None}
    assert found == expected
    assert not request_of(silent).force
    assert read_heartbeats(silent.storage) == [], "the command is not a predictor"
    assert "requested a takeover from generation 1, whose last sign of life was" in cli("takeover", url)


def test_the_command_waits_for_a_claim(cli: Cli, silent: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_LOOK_SECONDS", 0.01)
    url = url_of(silent)
    assert "no standby has claimed the stream" in cli("takeover", url, "--wait", 0.02, code=1)
    assert cli.json("takeover", url, "--wait", 0.02, code=1)["successor"] is None
    assert silent.storage.size(_REQUEST) is not None
    standby = threading.Timer(0.05, lambda: Writer(silent.storage))
    standby.start()
    assert cli.json("takeover", url, "--wait", 60)["successor"] == 2
    standby.join()
    assert "generation 2 has claimed" not in cli("takeover", url, "--force")


def test_a_request_is_cancelled(cli: Cli, silent: Writer) -> None:
    url = url_of(silent)
    assert cli.json("takeover", url, "--cancel") == {"url": url, "cancelled": False}
    cli("takeover", url)
    for other in (["--force"], ["--wait", 1], ["--silence", 1], ["--silence", 30]):
        cli("takeover", url, "--cancel", *other, code=2)
    assert silent.storage.size(_REQUEST) is not None
    assert "the request is cancelled" in cli("takeover", url, "--cancel")
    assert silent.storage.size(_REQUEST) is None


def test_two_commands_look_at_the_same_time(cli: Cli, silent: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, url = stream_takeover.write_heartbeat, url_of(silent)

    def left(storage: Storage, beat: Heartbeat) -> None:
        leave(storage, beat)
        monkeypatch.undo()
        cli("takeover", url)  # before the first command has read its own heartbeat

    monkeypatch.setattr(stream_takeover, "write_heartbeat", left)
    cli("takeover", url)
    assert read_heartbeats(silent.storage) == []


@pytest.mark.parametrize("option", ["--wait", "--silence"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "x"])
def test_wrong_numbers_of_seconds_are_refused(cli: Cli, silent: Writer, option: str, seconds: str) -> None:
    cli("takeover", url_of(silent), option, seconds, code=2)
    assert silent.storage.size(_REQUEST) is None
