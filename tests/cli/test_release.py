"""``release``: output, and the exit codes of refused calls."""

from __future__ import annotations

from tests.cli.commands import Cli, url_of
from tests.stream.streams import Writer


def test_a_release_prints_the_snapshot(cli: Cli, writer: Writer) -> None:
    cli("release", url_of(writer), code=2)
    assert "not pinned" in cli.err
    cli("rollback", url_of(writer), 2)
    cli("release", url_of(writer), code=2)
    assert "no snapshot above version 4" in cli.err
    assert "or wait for its next snapshot" in cli.err
    writer.snapshot()
    writer.delta([1])
    assert cli("release", url_of(writer)).startswith("released: predictors continue from the snapshot 5")
    cli("release", url_of(writer), code=2)
    cli("rollback", url_of(writer), 2)
    writer.snapshot()
    assert cli.json("release", url_of(writer), "--reason", "repaired")["version"] == 7
