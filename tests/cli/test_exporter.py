"""``delta-tracker exporter``, as a process."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from tests.cli.commands import Cli, beat, date, leave, path_of, url_of
from tests.stream.streams import Writer

_DEADLINE_SECONDS = 60


@contextmanager
def _exporter(url: str, *, every: int = 1) -> Iterator[str]:
    """Run the command; yield the url of its metrics."""
    call = [sys.executable, "-W", "ignore", "-m", "delta_tracker.cli", "exporter", url, "--port", "0"]
    with subprocess.Popen([*call, "--every", str(every), "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(_DEADLINE_SECONDS) == 143
        finally:
            process.kill()


def _metrics(url: str) -> dict[str, float]:
    """Return the value of each cell by its name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("delta_tracker_") and "_created" not in line)
    return {name: float(value) for name, value in pairs}


def _awaited(url: str, name: str) -> dict[str, float]:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        found = _metrics(url)
        if any(each.startswith(name) for each in found):
            return found
        assert time.monotonic() < deadline, f"{name} in {sorted(found)}"
        time.sleep(0.1)


def test_it_serves_ages_lags_and_heartbeats(writer: Writer) -> None:
    for path in path_of(writer, "log").iterdir():
        date(path, 100)
    PublisherHeartbeatWriter(writer.storage).write(writer.claim.head)
    leave(writer, beat(writer, "host-7", version=2, lag_versions=2, lag_seconds=7.0, differences="a; b"))
    leave(writer, beat(writer, "stopped", seconds=0.0))
    stream = f'{{url="{url_of(writer)}"}}'
    with _exporter(url_of(writer)) as url:
        found = _awaited(url, "delta_tracker_heartbeat_age_seconds")
        assert found[f"delta_tracker_stream_version{stream}"] == 4
        assert 99 < found[f"delta_tracker_stream_age_seconds{stream}"] < 100 + _DEADLINE_SECONDS
        assert found[f"delta_tracker_stream_pending_rows{stream}"] == 0
        assert found[f"delta_tracker_publisher_heartbeat_age_seconds{stream}"] < _DEADLINE_SECONDS
        assert found['delta_tracker_heartbeat_lag_versions{predictor="host-7"}'] == 2
        assert not [each for each in found if "stopped" in each]
        assert found['delta_tracker_heartbeat_lag_seconds{predictor="host-7"}'] == 7
        assert found['delta_tracker_heartbeat_model_differences{predictor="host-7"}'] == 2


def test_the_first_numbers_do_not_wait_for_an_interval(writer: Writer) -> None:
    with _exporter(url_of(writer), every=3600) as url:
        assert (
            _awaited(url, "delta_tracker_stream_version")[f'delta_tracker_stream_version{{url="{url_of(writer)}"}}']
            == 4
        )


def test_it_waits_for_a_stream_and_shows_that_one_is_lost(writer: Writer) -> None:
    away = path_of(writer, "log").with_name("away")
    path_of(writer, "log").rename(away)
    with _exporter(url_of(writer)) as url:
        assert not any("stream_version" in name for name in _metrics(url))
        shutil.move(away, path_of(writer, "log"))
        _awaited(url, "delta_tracker_stream_version")
        newest = max(path_of(writer, "log").iterdir())
        newest.write_bytes(b"garbage")
        found = _awaited(url, "delta_tracker_outlet_errors_total")
        assert not any("stream_version" in name for name in found)


def test_a_port_in_use_is_named(cli: Cli, writer: Writer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cli("exporter", url_of(writer), "--port", taken.getsockname()[1], code=2)
    assert "--port" in cli.err
    assert "Choose another port" in cli.err
