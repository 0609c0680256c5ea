"""The command ``sink`` as a process that is ended and killed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests import forked
from tests.cli.commands import Cli, make, url_of
from tests.cli.sqlite_sink import SqliteSink, assert_holds
from tests.stream.streams import Writer

_TARGET = "tests.cli.sqlite_sink:sink"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return make(tmp_path / "stream")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rows.sqlite"
    monkeypatch.setenv("SINK_FILE", str(path))
    return path


def _service(writer: Writer, folder: Path) -> forked.Program:
    command = ("delta_tracker.cli", "sink", url_of(writer), _TARGET, "--poll", "0.02")
    return forked.Program(*command, output=folder / "output", errors=folder / "errors")


def _await(file: Path, version: int) -> None:
    end = time.monotonic() + 240
    sink = SqliteSink(file)
    sink.open()
    while not any(state.version == version and state.applying is None for state in sink.states()):
        assert time.monotonic() < end, sink.states()
        time.sleep(0.02)
    sink.close()


def test_a_service_follows_until_a_signal(cli: Cli, writer: Writer, file: Path) -> None:
    service = _service(writer, file.parent)
    try:
        _await(file, 4)
        writer.delta([1, 2])
        _await(file, 5)
        service.send_signal(signal.SIGTERM)
        assert service.wait(240) == 143
    finally:
        service.kill()
        service.wait(240)
    assert_holds(file, writer, 5)
    assert cli("sink", url_of(writer), _TARGET, "--once") == "version 5 is stored\n"


@pytest.mark.sweep("long", only=True)
def test_a_service_that_is_killed_continues(cli: Cli, writer: Writer, file: Path) -> None:
    chance = random.Random(1)
    for version in range(5, 15):
        service = _service(writer, file.parent)
        try:
            _await(file, version - 1)
            writer.delta(sorted(chance.sample(range(50), 20)))
            time.sleep(chance.uniform(0, 0.05))
        finally:
            service.kill()
            service.wait(240)
    assert cli("sink", url_of(writer), _TARGET, "--once") == "version 14 is stored\n"
    assert_holds(file, writer, 14)
