"""``mirror``: copy a stream to another store and follow it, or promote such a copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import click

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.numbers import Number
from delta_tracker.cli.stream_command import Stream, store_options, stream_command
from delta_tracker.cli.text import size
from delta_tracker.errors import NoSnapshotError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.mirror import Mirror
from delta_tracker.stream.promotion import promote
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import default_poll_seconds

_HELP = """Copy the stream at URL to DST and follow it, until Ctrl-C.

DST is a bucket or directory. Its log has the same bytes as the source's, from the newest snapshot on, and every object
that an entry names is copied before the entry. An interrupted mirror continues where it stopped. If DST is not a prefix
of URL, or URL has lost a version, the command stops with exit code 1. Run one mirror per DST.

With --promote, URL is the mirror, and nothing is copied: a new stream starts after its newest entry. Stop the mirror
and restore the trainer from it before.

\b
Examples:
  delta-tracker mirror s3://bucket/ctr s3://other/ctr --dst-option region=eu-west-1
  delta-tracker mirror https://cache/ctr file:///streams/ctr --keep-versions 1000
  delta-tracker mirror s3://other/ctr --promote
"""


@click.command("mirror", help=_HELP)
@stream_command
@click.argument("dst", required=False)
@click.option("--once", is_flag=True, help="Exit when DST has every version of URL.")
@click.option("--keep-versions", type=click.IntRange(1), help="Delete older versions at DST that no reader needs.")
@click.option("--poll", type=Number(0.01), metavar="SECONDS", help="Polling interval. Default: by URL.")
@click.option(
    "--dst-option",
    "dst_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the remote store at DST, see --option.",
)
@click.option("--promote", "promotes", is_flag=True, help="Start a new stream at the mirror URL.")
def command(
    stream: Stream,
    dst: str | None,
    dst_options: Sequence[str],
    poll: float | None,
    keep_versions: int | None,
    *,
    once: bool,
    promotes: bool,
) -> int:
    """Copy the stream until Ctrl-C, or with ``once`` up to its newest version, and print each copied entry."""
    if promotes:
        if dst is not None or dst_options or poll is not None or keep_versions is not None or once:
            raise click.UsageError("Pass only the URL of the mirror with --promote.")
        return _promote(stream)
    if dst is None:
        raise click.UsageError("Pass DST, the URL of the copy.")
    if once:
        stream.newest_readable()  # before anything is created
    destination = Storage(dst, create=True, options=store_options(dst_options, "--dst-option"))
    if not destination.is_read_only:
        destination.probe()
    mirror = Mirror(
        stream.storage,
        destination,
        retention=None if keep_versions is None else Retention(versions=keep_versions),
    )
    mirror.run(
        stop=threading.Event(),
        poll_seconds=default_poll_seconds(stream.storage.url) if poll is None else poll,
        on_entry=lambda entry: _show(stream, entry),
        once=once,
    )
    if once and mirror.head is None:
        raise NoSnapshotError(stream.storage.url)
    return 0


def _promote(stream: Stream) -> int:
    fork = promote(stream.storage)
    assert fork.forked_from is not None, "promote() returns a fork"
    if stream.out.is_json:
        stream.out.json(
            {
                "url": stream.storage.url,
                "stream": fork.stream,
                "version": fork.version,
                "generation": fork.generation,
                "forked_from": {
                    "stream": fork.forked_from.stream,
                    "version": fork.forked_from.version,
                    "xxh3": fork.forked_from.xxh3,
                },
            }
        )
    else:
        stream.out.line(
            f"version {fork.version} starts the stream {fork.stream}, forked from version {fork.forked_from.version} "
            f"of {fork.forked_from.stream}. Build a publisher with this URL"
        )
    return 0


def _show(stream: Stream, entry: Manifest) -> None:
    if stream.out.is_json:
        stream.out.json(Entry.of(entry).to_dict())
    else:
        stream.out.line(f"copied version {entry.version}, a {entry.kind} of {size(entry.total_bytes)}")
