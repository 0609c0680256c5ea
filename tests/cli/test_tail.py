"""``delta-tracker tail`` on real streams, in this process and as a program."""

from __future__ import annotations

import json

import pytest

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention, retain
from tests.cli.commands import Cli, path_of, url_of
from tests.stream.streams import FQN, Writer


def test_tail_shows_the_newest_lines_and_ends_by_count(cli: Cli, writer: Writer) -> None:
    lines = cli("tail", url_of(writer), "--lines", 3, "--count", 2, "--json").splitlines()
    assert [json.loads(line)["version"] for line in lines] == [2, 3]
    assert json.loads(lines[0])["tables"] == {FQN: {"rows": 3, "bytes": 48}}
    screen = cli("tail", url_of(writer), "-n", 100, "-c", 5).splitlines()
    assert len(screen) == 6
    assert "snapshot" in screen[2]
    assert max(map(len, screen)) <= 100


def test_tail_notices_another_stream(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(_: float) -> None:
        for path in path_of(writer, "log").iterdir():
            path.unlink()
        Writer(writer.storage)

    monkeypatch.setattr("time.sleep", replaced)
    cli("tail", url_of(writer), code=1)
    assert cli.err.startswith(f"error: the stream {url_of(writer)} is not the one of which version 4 was applied")


def test_tail_passes_over_what_retention_deleted(cli: Cli, writer: Writer) -> None:
    again = Writer(writer.storage, num_rows=50)
    again.snapshot()
    retain(again.storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(again.storage).versions() == [0, 4, 5, 6]
    lines = cli("tail", url_of(again), "--json", "--count", 4).splitlines()
    assert [json.loads(line)["version"] for line in lines] == [0, 4, 5, 6]
    assert cli.err == ""
