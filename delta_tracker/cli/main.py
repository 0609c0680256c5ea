"""Entry point and exit codes of ``delta-tracker``."""

import errno
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from delta_tracker.cli.text import error_text, escaped
from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    InvalidArgumentError,
    MalformedError,
    MirrorDivergedError,
    MissingExtraError,
    MissingVersionError,
    NoSnapshotError,
    StreamReplacedError,
)

_logger = logging.getLogger("delta_tracker")
FINDING = 1
UNUSABLE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

# Numbers of the errors of a write to a full disk, a file above its limit, or a failing device.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Errors that are caused by the stream itself, not by the call or by the connection to the store.
_FINDINGS = (
    CorruptPartError,
    MalformedError,
    MirrorDivergedError,
    MissingVersionError,
    NoSnapshotError,
    StreamReplacedError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` specify. None uses the command line ``sys.argv[1:]``.

    Returns:
        The exit code: 0 for success; 1 if the stream is damaged or a check found problems; 2 if the arguments are
        invalid or the store cannot be reached; 130 if interrupted; 141 if the output pipe was closed.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s: %(message)s"))
    _logger.addHandler(handler)
    try:
        if sys.stdout is None:  # the descriptor is closed, and the next file that is opened would get it
            raise InvalidArgumentError("stdout", "closed", "Redirect it to a file, or to /dev/null")
        return _run(arguments)
    except DeltaTrackerError as error:
        _print_error(error_text(error))
        return FINDING if isinstance(error, _FINDINGS) else UNUSABLE
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        _discard_output()
        _print_error(f"error: the output cannot be written: {error.strerror}. Redirect it to a file with enough space.")
        return UNUSABLE
    finally:
        _logger.removeHandler(handler)


def _discard_output() -> None:
    """Discard buffered output, because the interpreter would otherwise report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Plain(logging.Formatter):
    """Log formatter that escapes control characters, because warnings may contain untrusted names and errors."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def _run(arguments: Sequence[str] | None) -> int:
    for package in ("click", "jinja2", "rich"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "cli")
    import click  # noqa: PLC0415  optional

    from delta_tracker.cli.commands import commands  # noqa: PLC0415  requires click

    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # Not commands.main(), whose exit code for a closed pipe is 1, which here means a damaged stream.
        with commands.make_context("delta-tracker", words) as context:
            code = commands.invoke(context)
    except click.exceptions.Exit as ended:  # raised by --help
        code = ended.exit_code
    except click.ClickException as error:
        error.show()
        code = UNUSABLE
    sys.stdout.flush()
    return int(code)


def _print_error(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
