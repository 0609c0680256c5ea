"""``report``: write one self-contained HTML page about a stream."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from delta_tracker.cli.figures import gather
from delta_tracker.cli.page import render
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import several, size
from delta_tracker.errors import InvalidArgumentError

_HELP = """Write one self-contained HTML page about a stream: delta size over time, hottest rows, how far rows move,
freshness, bytes saved.

The page needs no network and loads no third-party scripts. By default the report reads the newest 10,000 versions, and
the rows of the newest 1 GB of them; the page states these ranges. Memory stays below 1 GB for a stream of any size.
Exit code 1 if the stream is damaged; the page is still written and lists the faults.

\b
Examples:
  delta-tracker report file:///streams/ctr
  delta-tracker report s3://bucket/ctr --out ctr.html --versions 500
  delta-tracker report s3://bucket/ctr --json | jq .bytes
"""


@click.command("report", help=_HELP)
@click.option(
    "--out", "path", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: report.html]"
)
@click.option(
    "--versions", default=10_000, metavar="N", type=click.IntRange(1), help="Number of newest versions to read."
)
@click.option(
    "--read",
    "megabytes",
    default=1000,
    metavar="MB",
    type=click.IntRange(0),
    help="Read the rows of the newest of them, up to this many MB.",
)
@stream_command
def command(stream: Stream, path: Path | None, versions: int, megabytes: int) -> int:
    """Write the page. With ``--json``, print the data instead, and write the page only if ``--out`` is given."""
    if path is not None and not path.absolute().parent.is_dir():  # check before reading, which may take hours
        raise InvalidArgumentError("--out", str(path), "Name a file in a directory that exists")
    figures = gather(stream, versions, megabytes * 1_000_000)
    if stream.out.is_json:
        stream.out.json(figures)
    if path is not None or not stream.out.is_json:
        page = (path or Path("report.html")).absolute()
        _write(page, render(figures))
        if not stream.out.is_json:
            stream.out.line(f"{page}: {size(page.stat().st_size)}")
            if num_faults := len(figures["faults"]) + figures["more_faults"]:
                stream.out.line(f"{several(num_faults, 'finding')}, listed in the page", "bold red")
    return 1 if figures["faults"] else 0


def _write(page: Path, text: str) -> None:
    """Write ``text`` to a temporary file and rename the file to ``page``, so that ``page`` is never incomplete.

    Raises:
        InvalidArgumentError: if the file cannot be written.
    """
    draft = page.with_name(f".{page.name}.{secrets.token_hex(8)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(page)
    except OSError as error:
        raise InvalidArgumentError("--out", str(page), f"Choose another path: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
