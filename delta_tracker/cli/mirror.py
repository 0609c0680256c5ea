"""``mirror``: copy a stream to another store and keep the copy up to date, or promote the copy."""

import logging
import threading
from collections.abc import Sequence
from functools import partial

import click

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.output import Output
from delta_tracker.cli.silence import SILENCE_SECONDS, check_silence
from delta_tracker.cli.stream_command import Number, Stream, store_options, stream_command
from delta_tracker.cli.text import size
from delta_tracker.errors import InvalidArgumentError, LivePublisherError, NoSnapshotError, StorageError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.url import LOCAL_POLL_SECONDS, REMOTE_POLL_SECONDS

_logger = logging.getLogger(__name__)
_HELP = """Copy the stream at URL to DST and follow it, until Ctrl-C.

DST is a bucket or directory. Its log has the same bytes as the source's, from the newest snapshot on, and every object
that an entry names is copied before the entry. An interrupted mirror continues where it stopped. If DST is not a prefix
of URL, or URL has lost a version, the command stops with exit code 1. Run one mirror per DST. With --table, DST gets
only the parts with these tables: predictors of these tables can read it, but no trainer can continue at it.

With --promote, nothing is copied: a new stream starts after the newest entry of DST, and takes the predictors of both
urls. Stop the trainer and the mirror, and restore the trainer from DST before. If the newest entry of URL or the last
heartbeat of its publisher is younger than --silence, nothing is promoted without --force. A publisher of versions
without states leaves no heartbeats: pass more than the time between its versions. A URL that cannot be read is lost,
so its publisher is not looked for. With --force, URL may be the mirror, without DST.

\b
Examples:
  delta-tracker mirror s3://bucket/ctr s3://other/ctr --dst-option region=eu-west-1
  delta-tracker mirror https://cache/ctr file:///streams/ctr --keep-versions 1000
  delta-tracker mirror s3://bucket/ctr file:///streams/items --table 'item.*'
  delta-tracker mirror s3://bucket/ctr s3://other/ctr --promote
"""


@click.command("mirror", help=_HELP)
@stream_command
@click.argument("dst", required=False)
@click.option("--once", is_flag=True, help="Exit when DST has every version of URL.")
@click.option("--keep-versions", type=click.IntRange(1), help="Delete older versions at DST that no reader needs.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="Copy only parts with tables of this name or pattern; repeat it for more.",
)
@click.option("--poll", type=Number(0.01), metavar="SECONDS", help="Polling interval. Default: by URL.")
@click.option(
    "--dst-option",
    "dst_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the remote store at DST, see --option.",
)
@click.option("--promote", "promotes", is_flag=True, help="Start a new stream at DST, a mirror of URL.")
@click.option("--force", "is_forced", is_flag=True, help="Promote even if the publisher of URL may be alive.")
@click.option(
    "--silence",
    metavar="SECONDS",
    type=Number(0),
    help="With --promote: time without an entry or a heartbeat after which the publisher counts as dead. Default: "
    f"{SILENCE_SECONDS:g}.",
)
def command(  # noqa: PLR0913  the options of the command
    stream: Stream,
    dst: str | None,
    dst_options: Sequence[str],
    tables: Sequence[str],
    poll: float | None,
    keep_versions: int | None,
    silence: float | None,
    *,
    once: bool,
    promotes: bool,
    is_forced: bool,
) -> int:
    """Copy the stream until Ctrl-C, or with ``once``, up to the newest version. With ``promotes``, promote the copy."""
    if promotes:
        if poll is not None or keep_versions is not None or once or tables:
            raise click.UsageError("Omit --once, --table, --poll and --keep-versions with --promote.")
        if dst is None and not is_forced:
            raise click.UsageError("Pass URL and DST with --promote, or only the URL of the mirror and --force.")
        found = stream.storage if dst is None else Storage(dst, options=store_options(dst_options, "--dst-option"))
        if not is_forced:
            _refuse_live_source(stream, found, SILENCE_SECONDS if silence is None else silence)
        return _promote(stream.out, found)
    if is_forced or silence is not None:
        raise click.UsageError("Pass --force and --silence only with --promote.")
    if dst is None:
        raise click.UsageError("Pass DST, the URL of the copy.")
    if once:
        stream.check_exists()  # before anything is created
    choice = TableChoice(tables or None)
    destination = Storage(dst, create=True, options=store_options(dst_options, "--dst-option"))
    if not destination.is_read_only:
        destination.probe()
    retention = None if keep_versions is None else Retention(versions=keep_versions)
    mirror = Mirror(stream.storage, destination, retention=retention, tables=tables or None)
    seconds = poll or (REMOTE_POLL_SECONDS if stream.storage.is_remote else LOCAL_POLL_SECONDS)
    show = partial(_show, stream, choice)
    mirror.run(stop=threading.Event(), poll_seconds=seconds, on_entry=show, once=once)
    if once and mirror.head is None:
        raise NoSnapshotError(stream.storage.url)
    return 0


def _refuse_live_source(stream: Stream, mirror: Storage, silence: float) -> None:
    """Check that the publisher of the source of ``mirror`` is silent. Log a warning if the source cannot be read.

    Raises:
        LivePublisherError: if the publisher may still be running.
        InvalidArgumentError: if ``mirror`` is not a mirror of the source, the source is read over HTTP, or ``silence``
            is too short.
        StorageError: if the source can be read, but the object that shows the store's time cannot be written.
    """
    if stream.storage.is_read_only:
        raise InvalidArgumentError("URL", stream.storage.url, "Pass the url of the bucket or directory, or --force")
    copied = StreamLog(mirror).head()
    try:
        head = stream.log.head()
    except StorageError as error:
        _logger.warning("the source is lost, so its publisher is not looked for: %s", error)
        return
    if head is None or copied is None:  # promote() names a mirror without a stream
        return
    if head.stream != (copied.stream if copied.forked_from is None else copied.forked_from.stream):
        raise InvalidArgumentError("DST", mirror.url, f"Pass a mirror of {stream.storage.url}")
    try:
        check_silence(stream.storage, silence)
    except LivePublisherError as alive:
        step = f"Stop that trainer, and repeat the command {silence:g} s later"
        raise alive.with_remedy(f"{step}; --force promotes at once, and takes its predictors") from None


def _promote(out: Output, mirror: Storage) -> int:
    fork = promote(mirror)
    assert fork.forked_from is not None, "promote() returns a fork"
    found = {"url": mirror.url, "stream": fork.stream, "version": fork.version, "generation": fork.generation}
    text = (
        f"version {fork.version} starts the stream {fork.stream}, forked from version {fork.forked_from.version} of "
        f"{fork.forked_from.stream}. Build a publisher with this URL"
    )
    out.result(found | {"forked_from": fork.forked_from}, text)
    return 0


def _show(stream: Stream, choice: TableChoice, entry: Manifest) -> None:
    copied = choice.copied(entry)
    text = f"copied version {entry.version}, a {entry.kind} of {size(copied.total_bytes)}"
    if entry.parts and not copied.parts:
        text = f"copied version {entry.version}, a {entry.kind} without rows of the chosen tables"
    stream.out.result(Entry.of(copied), text)
