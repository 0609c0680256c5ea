"""Shared code of the commands: the stream argument, store options, option types, and the handling of SIGTERM."""

import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import click

from delta_tracker.cli.entries import read_all
from delta_tracker.cli.output import Output
from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage

_MAX = 1e9  # seconds that each kind of wait accepts
_URL = click.Argument(["url"])
_OPTION = click.Option(
    ["--option", "-o", "options"],
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the remote store by obstore's name, such as endpoint, region, allow_http or timeout. "
    "Pass secrets in the environment: other users can see the command line.",
)
_JSON = click.Option(["--json", "is_json"], is_flag=True, help="Print JSON on stdout instead of tables.")


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream and output of a command. :func:`stream_command` passes this object to the decorated function."""

    storage: Storage
    log: StreamLog
    out: Output

    def entries(self, versions: Sequence[int]) -> Iterator[tuple[int, Manifest | MalformedError]]:
        """Yield each version with its entry, or with an error if the entry is malformed. Show a progress bar.

        Missing entries are omitted, because retention may delete entries at any time.
        """
        with self.out.progress("reading the log", len(versions)) as advance:
            for version, entry in read_all(versions, self.log.read):
                advance()
                if entry is not None:
                    yield version, entry

    def head(self) -> Manifest:
        """Return the newest entry of the log.

        Raises:
            InvalidArgumentError: if there is no stream.
        """
        head = self.log.head()
        if head is None:
            remedy = "Check the URL, or start the publisher: there is no stream"
            raise InvalidArgumentError("URL", self.storage.url, remedy)
        return head

    def wait_for_head(self, every: float) -> Manifest:
        """Return the newest entry. If there is no stream yet, poll every ``every`` seconds until there is one."""
        if (head := self.log.head()) is None:
            self.out.note(f"there is no stream at {self.storage.url} yet: waiting for its first version")
        while head is None:
            time.sleep(every)
            head = self.log.head()
        return head

    def check_exists(self) -> None:
        """Raise InvalidArgumentError if there is no stream."""
        with suppress(MalformedError):  # entries below the newest one can be read
            self.head()


def stream_command(function: Callable[..., int]) -> Callable[..., int]:
    """Decorator that adds the argument ``URL`` and the options ``--option`` and ``--json`` to a click command.

    Place the decorator below ``click.command`` and above the command's own arguments, so that ``URL`` is the first
    argument. ``function`` is called with a :class:`Stream` and the command's own parameters. It returns the exit code.
    """

    @functools.wraps(function)
    def wrapped(url: str, options: Sequence[str], *, is_json: bool, **own: object) -> int:
        storage = Storage(url, options=store_options(options))
        return function(Stream(storage, StreamLog(storage), Output(is_json=is_json)), **own)

    # click reverses this list: the URL precedes the command's own parameters, the options follow them.
    own_params = list(getattr(function, "__click_params__", ()))
    wrapped.__click_params__ = [_JSON, _OPTION, *own_params, _URL]  # type: ignore[attr-defined]
    return wrapped


def store_options(options: Sequence[str], option: str = "--option") -> dict[str, str] | None:
    """Convert ``name=value`` strings to a dict. Return None if there are no strings.

    Raises:
        click.UsageError: if a string has no name or no ``=``. The message omits the string, which may be secret.
    """
    pairs = [each.partition("=") for each in options]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise click.UsageError(f"A value of {option} has no {'name' if equals else '='}. Write name=value.")
    return {name: value for name, _, value in pairs} or None


class Number(click.FloatRange):
    """Parameter type of ``click`` for numbers from ``least`` to ``most``. NaN is rejected.

    If ``most`` is None, the maximum is 1e9. If ``above`` is True, the number must be greater than ``least``.
    """

    def __init__(self, least: float, most: float | None = None, *, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert the text of an option to a number. Call ``fail()`` if the number is out of range."""
        number = super().convert(value, param, ctx)
        if not number <= _MAX:  # NaN passes the comparisons of a range
            self.fail(f"{value} is not a number up to {_MAX:g}.", param, ctx)
        return number


@contextmanager
def os_errors_of(option: str, value: object, remedy: str = "Choose another path") -> Iterator[None]:
    """Context manager that converts an OSError to an InvalidArgumentError about ``option``, except a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise InvalidArgumentError(option, value, f"{remedy}: {error.strerror}") from error


@contextmanager
def terminated() -> Iterator[None]:
    """Context manager that makes SIGTERM raise SystemExit with code 143, so that ``finally`` blocks run."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
