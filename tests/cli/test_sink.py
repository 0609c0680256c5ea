"""``sink``: targets, options and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, url_of
from tests.cli.sqlite_sink import assert_holds
from tests.heartbeats import read_heartbeats
from tests.stream.streams import FQN, Writer

_TARGET = "tests.cli.sqlite_sink:sink"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rows.sqlite"
    monkeypatch.setenv("SINK_FILE", str(path))
    return path


def test_once_writes_the_newest_version(cli: Cli, writer: Writer, file: Path) -> None:
    assert cli("sink", url_of(writer), _TARGET, "--once") == "version 4 is stored\n"
    assert_holds(file, writer, 4)
    writer.delta([3, 4])
    assert json.loads(cli("sink", url_of(writer), _TARGET, "--once", "--json", "--name", "sink-1")) == {"version": 5}
    assert_holds(file, writer, 5)
    assert [beat.version for beat in read_heartbeats(writer.storage)] == [5]


def test_only_the_chosen_tables_are_written(cli: Cli, writer: Writer, file: Path) -> None:
    cli("sink", url_of(writer), _TARGET, "--once", "--table", "item", code=2)
    assert "Pass names of the stream" in cli.err
    assert cli("sink", url_of(writer), _TARGET, "--once", "--table", "ec.*", "--table", FQN) == "version 4 is stored\n"
    assert_holds(file, writer, 4)


def test_a_stream_without_a_snapshot_has_exit_code_1(cli: Cli, tmp_path: Path, file: Path) -> None:
    storage = Storage((tmp_path / "empty").as_uri(), create=True)
    cli("sink", storage.url, _TARGET, "--once", code=1)
    assert "has no snapshot" in cli.err


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("memcached://127.0.0.1", "memcached://"),
        ("redis://:secret@127.0.0.1/0?color=red", "color"),
        ("redis://", "redis://"),
        ("lmdb://host/directory", "absolute path"),
        ("lmdb:///", "absolute path"),
        ("lmdb:///directory?size=1", "absolute path"),
        ("/directory", "MODULE:FUNCTION"),
        ("no.such.module:sink", "No module named"),
        ("tests.cli.sqlite_sink:no_such_function", "no_such_function"),
        ("tests.cli.sqlite_sink:not_a_sink", "returned a str"),
    ],
)
def test_an_invalid_target_has_exit_code_2(cli: Cli, writer: Writer, target: str, text: str) -> None:
    cli("sink", url_of(writer), target, "--once", code=2)
    assert text in cli.err
    assert "secret" not in cli.err


def test_options_that_have_no_effect_are_refused(cli: Cli, writer: Writer) -> None:
    cli("sink", url_of(writer), _TARGET, "--once", "--poll", "1", code=2)


def test_a_directory_of_lmdb_is_a_target(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    target = f"lmdb://{tmp_path / 'rows'}"
    assert cli("sink", url_of(writer), target, "--once") == "version 4 is stored\n"
    writer.delta([1])
    assert cli("sink", url_of(writer), target, "--once") == "version 5 is stored\n"
