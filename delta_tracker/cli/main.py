"""Where ``delta-tracker`` begins and ends: the commands, each imported when it is called, and the exit codes."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from delta_tracker.cli.text import error_text, plain
from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    MalformedError,
    MissingExtraError,
    MissingVersionError,
    NoSnapshotError,
    StreamReplacedError,
)

_logger = logging.getLogger("delta_tracker")

OK = 0
FINDING = 1
UNUSABLE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

# What a stream itself is to blame for, as against the call or the way to the store.
_FINDINGS = (
    CorruptPartError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    StreamReplacedError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: as in a shell; by default those of this process.

    Returns:
        The exit code: 0 done; 1 the stream is damaged, or a check found something; 2 the call is wrong, or the store
        cannot be reached; 130 interrupted; 141 nobody reads the output any more.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s: %(message)s"))
    _logger.addHandler(handler)
    try:
        return _run(arguments)
    except DeltaTrackerError as error:
        _say(error_text(error))
        return FINDING if isinstance(error, _FINDINGS) else UNUSABLE
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        _logger.removeHandler(handler)


class _Plain(logging.Formatter):
    """Warnings of the library quote names and errors that anybody may have written."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def _run(arguments: Sequence[str] | None) -> int:
    for package in ("click", "rich"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "cli")
    import click  # noqa: PLC0415  optional

    from delta_tracker.cli.commands import commands  # noqa: PLC0415  it needs click

    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # Not commands.main(), which has exit codes of its own: 1 for a closed pipe would read as a damaged stream.
        with commands.make_context("delta-tracker", words) as context:
            code = commands.invoke(context)
    except click.exceptions.Exit as ended:  # help was asked for
        code = ended.exit_code
    except click.ClickException as error:
        error.show()
        code = UNUSABLE
    sys.stdout.flush()
    return int(code)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
