"""``mirror``: copies, exit codes, options and the promotion of a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, date, make, path_of, url_of
from tests.heartbeats import read_heartbeats
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
        [url_of(writer), "--promote"],
        [url_of(writer), copy, "--promote", "--once"],
        [url_of(writer), copy, "--promote", "--poll", "1"],
        [url_of(writer), copy, "--promote", "--keep-versions", "1"],
        [url_of(writer), copy, "--force"],
        [url_of(writer), copy, "--silence", "1"],
        [url_of(writer), copy, "--once", "--dst-option", "secret"],
        [(copy / "missing").as_uri(), "--promote", "--force"],
        [url_of(writer), copy, "--promote"],
        [url_of(writer), copy, "--poll", "0"],
    ):
        cli("mirror", *arguments, code=2)
        assert not copy.exists()
        assert "secret" not in cli.err
    assert StreamLog(writer.storage).head() == writer.claim.head


def test_a_copy_is_promoted(cli: Cli, writer: Writer, copy: Path) -> None:
    cli("mirror", url_of(writer), copy, "--once")
    found = cli.json("mirror", copy, "--promote", "--force")
    head = writer.claim.head
    assert found["forked_from"] == {"stream": head.stream, "version": 4, "xxh3": head.xxh3}
    assert (found["version"], found["generation"]) == (5, 2)
    out = cli("mirror", url_of(writer), copy, "--promote", "--silence", "0")
    assert f"version 5 starts the stream {found['stream']}, forked from version 4 of {head.stream}" in out
    assert StreamLog(Storage(copy.as_uri())).versions() == [1, 2, 3, 4, 5]


@pytest.fixture
def copied(cli: Cli, writer: Writer, copy: Path) -> Writer:
    """A stream that was copied, and whose publisher has committed its last entry 100 s ago."""
    cli("mirror", url_of(writer), copy, "--once")
    for path in path_of(writer, "log").iterdir():
        date(path, 100)
    return writer


@pytest.mark.advice("LivePublisherError: check_silence")
@pytest.mark.parametrize("sign", ["version", "heartbeat"])
@pytest.mark.parametrize("way", ["wait", "force"])
def test_a_mirror_of_a_live_publisher_is_not_promoted(
    cli: Cli, copied: Writer, copy: Path, sign: str, way: str
) -> None:
    url = url_of(copied)
    if sign == "version":
        date(path_of(copied, entry_name(4)), 0)
    else:
        PublisherHeartbeatWriter(copied.storage).write(copied.claim.head)
    assert cli("mirror", url, copy, "--promote", code=2) == ""
    assert f"error: {url} has a live publisher of generation 1: version 4, last sign" in cli.err
    assert "Stop that trainer, and repeat the command 30 s later; --force promotes at once" in cli.err
    assert StreamLog(Storage(copy.as_uri())).versions() == [1, 2, 3, 4]
    assert read_heartbeats(copied.storage) == [], "the command is not a predictor"
    if way == "wait":
        name = entry_name(4) if sign == "version" else f"publishers/{1:020d}.json"
        date(path_of(copied, name), 100)
    assert cli.json("mirror", url, copy, "--promote", *(["--force"] if way == "force" else []))["version"] == 5


def test_the_silence_of_a_publisher_has_a_bound(cli: Cli, copied: Writer, copy: Path) -> None:
    url = url_of(copied)
    cli("mirror", url, copy, "--promote", "--silence", "200", code=2)
    assert "has a live publisher" in cli.err
    PublisherHeartbeatWriter(copied.storage, 40.0).write(copied.claim.head)
    cli("mirror", url, copy, "--promote", code=2)
    assert "Pass more than 40 s, the time between the publisher's heartbeats, or --force" in cli.err
    assert StreamLog(Storage(copy.as_uri())).versions() == [1, 2, 3, 4]


@pytest.mark.parametrize("loss", ["unreadable", "removed", "emptied"])
def test_a_mirror_of_a_lost_source_is_promoted(cli: Cli, copied: Writer, copy: Path, loss: str) -> None:
    log = path_of(copied, "log")
    shutil.rmtree(log if loss == "unreadable" else log.parent)
    if loss == "unreadable":
        log.symlink_to("log")
    elif loss == "emptied":
        log.parent.mkdir()
    assert cli.json("mirror", url_of(copied), copy, "--promote")["version"] == 5
    assert ("the source is lost" in cli.err) == (loss == "unreadable")


def test_only_a_mirror_of_the_source_is_promoted(cli: Cli, copied: Writer, copy: Path) -> None:
    other = make(copy.with_name("other"))
    for path in path_of(other, "log").iterdir():
        date(path, 100)
    cli("mirror", url_of(other), copy, "--promote", code=2)
    assert f"Pass a mirror of {url_of(other)}" in cli.err
    cli("mirror", "http://127.0.0.1:1", copy, "--promote", code=2)
    assert "Pass the url of the bucket or directory, or --force" in cli.err
    assert StreamLog(Storage(copy.as_uri())).versions() == [1, 2, 3, 4]
    cli("mirror", url_of(copied), copy, "--promote")
    assert "version 5 starts the stream" in cli("mirror", url_of(copied), copy, "--promote"), "a repeated call finds it"


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


@pytest.mark.advice("MissingVersionError: _missing_error")
@pytest.mark.parametrize("is_claim", [False, True])
def test_a_source_with_a_gap_is_named(cli: Cli, writer: Writer, copy: Path, is_claim: bool) -> None:
    if is_claim:
        writer.claim = StreamLog(writer.storage).claim()
        writer.delta([1])
    lost = writer.delta([2]).version
    writer.delta([3])
    path_of(writer, entry_name(lost)).unlink()
    cli("mirror", url_of(writer), copy, "--once", code=1)
    url, text = url_of(writer), f"version {lost} is missing, and the newest version is {lost + 1}"
    assert cli.err.startswith(f"error: {text}. Publish a snapshot to {url},")
    writer.snapshot()
    cli("mirror", url_of(writer), copy, "--once", code=1)
    assert "Mirror to an empty destination" in cli.err
    cli("mirror", url_of(writer), copy.with_name("other"), "--once")


def test_versions_of_the_former_stream_are_read_but_not_pinned(cli: Cli, writer: Writer, copy: Path) -> None:
    cli("mirror", url_of(writer), copy, "--once")
    expected = cli.json("diff", url_of(writer), 2, 4)["changed"]
    promoted = cli.json("mirror", copy, "--promote", "--force")["stream"]
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
