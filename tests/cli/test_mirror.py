"""``mirror``: copies, exit codes, options and the promotion of a copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, url_of
from tests.stream.streams import Writer


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def test_each_copied_entry_is_printed(cli: Cli, writer: Writer, copy: Path) -> None:
    out = cli("mirror", url_of(writer), copy.as_uri(), "--once")
    assert [line.split(",")[0] for line in out.splitlines()] == [f"copied version {each}" for each in (1, 2, 3, 4)]
    assert "copied version 1, a snapshot of" in out
    assert cli("mirror", url_of(writer), copy.as_uri(), "--once") == ""
    writer.delta([1])
    lines = cli("mirror", url_of(writer), copy, "--once", "--json").splitlines()
    assert [json.loads(line)["version"] for line in lines] == [5]
    assert cli("verify", copy.as_uri())


def test_keep_versions_is_the_copys_retention(cli: Cli, writer: Writer, copy: Path) -> None:
    for _ in range(3):
        writer.snapshot()
    cli("mirror", url_of(writer), copy, "--once", "--keep-versions", "2")
    assert StreamLog(Storage(copy.as_uri())).versions() == [7]


def test_a_difference_has_exit_code_1(cli: Cli, writer: Writer, copy: Path) -> None:
    cli("mirror", url_of(writer), copy, "--once")
    StreamLog(Storage(copy.as_uri())).claim()
    writer.delta([1])
    cli("mirror", url_of(writer), copy, "--once", code=1)
    assert "differs from" in cli.err
    assert "at version 5" in cli.err


def test_invalid_calls_have_exit_code_2(cli: Cli, writer: Writer, copy: Path) -> None:
    for arguments in (
        [url_of(writer)],
        [url_of(writer), url_of(writer), "--once"],
        [url_of(writer), "http://127.0.0.1:1/copy", "--once"],
        [url_of(writer), copy, "--promote"],
        [url_of(writer), "--promote", "--once"],
        [url_of(writer), "--promote", "--dst-option", "region=x"],
        [url_of(writer), copy, "--once", "--dst-option", "secret"],
        [(copy / "missing").as_uri(), "--promote"],
        [url_of(writer), copy, "--poll", "0"],
    ):
        cli("mirror", *arguments, code=2)
        assert not copy.exists()
        assert "secret" not in cli.err
    assert StreamLog(writer.storage).head() == writer.claim.head


def test_a_copy_is_promoted(cli: Cli, writer: Writer, copy: Path) -> None:
    cli("mirror", url_of(writer), copy, "--once")
    found = cli.json("mirror", copy, "--promote")
    head = writer.claim.head
    assert found["forked_from"] == {"stream": head.stream, "version": 4, "xxh3": head.xxh3}
    assert (found["version"], found["generation"]) == (5, 2)
    out = cli("mirror", copy, "--promote")
    assert f"version 5 starts the stream {found['stream']}, forked from version 4 of {head.stream}" in out
    assert StreamLog(Storage(copy.as_uri())).versions() == [1, 2, 3, 4, 5]
