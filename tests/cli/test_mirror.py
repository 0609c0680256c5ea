"""``mirror``: copies, exit codes, options and the promotion of a copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, path_of, url_of
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


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_source_without_a_stream_is_named_before_anything_is_created(
    cli: Cli, writer: Writer, copy: Path, option: tuple[str, ...]
) -> None:
    (copy.parent / "empty").mkdir()
    for source in ("nowhere", "empty"):
        url = (copy.parent / source).as_uri()
        assert cli("mirror", url, copy, "--once", *option, code=2) == ""
        assert f"URL='{url}' cannot be used. Check the URL" in cli.err
        assert not copy.exists()
    claimed = StreamLog(Storage((copy.parent / "claimed").as_uri(), create=True))
    claimed.claim()
    cli("mirror", claimed.storage.url, copy, "--once", *option, code=1)
    assert f"the stream {claimed.storage.url} has no snapshot yet" in cli.err


@pytest.mark.advice("SourceGapError: Mirror._gone")
@pytest.mark.parametrize("is_claim", [False, True])
def test_a_source_with_a_gap_is_named(cli: Cli, writer: Writer, copy: Path, is_claim: bool) -> None:
    if is_claim:
        writer.claim = StreamLog(writer.storage).claim()
        writer.delta([1])
    lost = writer.delta([2]).version
    writer.delta([3])
    path_of(writer, entry_name(lost)).unlink()
    cli("mirror", url_of(writer), copy, "--once", code=1)
    text = f"error: {url_of(writer)} lacks version {lost}, and has no snapshot above it. Publish a snapshot there"
    assert cli.err.startswith(text)
    writer.snapshot()
    cli("mirror", url_of(writer), copy, "--once", code=1)
    assert "Mirror to an empty destination" in cli.err
    cli("mirror", url_of(writer), copy.with_name("other"), "--once")


def test_versions_of_the_former_stream_are_read_but_not_pinned(cli: Cli, writer: Writer, copy: Path) -> None:
    cli("mirror", url_of(writer), copy, "--once")
    expected = cli.json("diff", url_of(writer), 2, 4)["changed"]
    promoted = cli.json("mirror", copy, "--promote")["stream"]
    former = writer.claim.head.stream
    for has_snapshot in (False, True):
        if has_snapshot:
            Writer(Storage(copy.as_uri()), num_rows=50).snapshot()
        assert cli.json("diff", copy, 2, 4)["changed"] == expected
        out = copy.with_name(f"out-{has_snapshot}")
        assert cli.json("export", copy, "--version", 3, "--out", out)["stream"] == former
        cli("export", copy, "--version", 3, "--dcp", out.with_suffix(".dcp"))
        cli("diff", copy, 2, 5, code=2)
        assert "Pass one before version 5, which starts another stream, or a later snapshot" in cli.err
        cli("rollback", copy, 3, code=2)
        assert f"version 3 belongs to the former stream {former}" in cli.err
        step = "whose newest snapshot is version 7" if has_snapshot else "Call Publisher.snapshot() first"
        assert step in cli.err
    assert cli.json("export", copy, "--out", copy.with_name("new"))["stream"] == promoted
    cli("diff", copy, 4, 7)
