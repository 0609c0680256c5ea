"""``rollback``: output, and the exit codes of refused calls."""

from __future__ import annotations

from pathlib import Path

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import newest_pin
from tests.cli.commands import Cli, entry, flip, path_of, url_of
from tests.stream.streams import Writer


def test_a_rollback_prints_the_pin(cli: Cli, writer: Writer) -> None:
    text = cli("rollback", url_of(writer), 2, "--reason", "bad")
    assert text.startswith("pinned to version 2 of 4, counter 1\n")
    pin = newest_pin(writer.storage)
    assert pin is not None
    assert (pin.kind, pin.version, pin.bad, pin.reason) == ("pin", 2, 4, "bad")
    assert cli.json("rollback", url_of(writer), 3, "--replace")["counter"] == 2


def test_refused_rollbacks_have_exit_code_2(cli: Cli, writer: Writer) -> None:
    StreamLog(writer.storage).claim()
    for arguments in ([99], [5], [2, "--reason", "x" * 1001]):
        cli("rollback", url_of(writer), *arguments, code=2)
    assert newest_pin(writer.storage) is None
    cli("rollback", url_of(writer), 2)
    cli("rollback", url_of(writer), 3, code=2)
    assert "already pinned to version 2" in cli.err
    cli("rollback", "http://127.0.0.1:1/stream", 2, code=2)
    assert "over http" in cli.err


def test_a_version_with_wrong_bytes_is_not_pinned(cli: Cli, writer: Writer) -> None:
    part = entry(writer, 2).parts[0].name
    flip(path_of(writer, part))
    cli("rollback", url_of(writer), 3, code=1)
    assert f"part {part} is corrupt: its xxh3 is not" in cli.err
    assert newest_pin(writer.storage) is None
    cli("rollback", url_of(writer), 3, "--quick")
    cli("rollback", url_of(writer), 2, code=2)
    assert "already pinned" in cli.err, "before the bytes are read"


def test_a_url_without_a_stream_is_named(cli: Cli, tmp_path: Path) -> None:
    url = (tmp_path / "nowhere").as_uri()
    for arguments in (["rollback", url, 3], ["release", url]):
        cli(*arguments, code=2)
        assert f"URL='{url}' cannot be used. Check the URL" in cli.err
