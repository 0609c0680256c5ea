"""The decorator of commands on a stream, and what they have in common: the URL, the store's options and ``--json``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delta_tracker.cli.output import Output
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage, Transfer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


_URL = click.Argument(["url"])
_OPTION = click.Option(
    ["--option", "-o", "options"],
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the remote store by obstore's name, such as endpoint, region, allow_http or timeout. "
    "Keep secrets in the environment: other users see a command line.",
)
_JSON = click.Option(["--json", "is_json"], is_flag=True, help="For machines: JSON on stdout instead of tables.")


class MeteredStorage(Storage):
    """A storage that tells ``on_read``, if it is set, how many bytes each read has brought."""

    on_read: Callable[[int], None] | None = None

    def read(
        self,
        name: str,
        *,
        max_bytes: int,
        out: NDArray[np.uint8] | None = None,
        transfer: Transfer | None = None,
    ) -> NDArray[np.uint8] | None:
        """See :meth:`Storage.read`."""
        return self._told(super().read(name, max_bytes=max_bytes, out=out, transfer=transfer))

    def read_range(self, name: str, begin: int, end: int) -> NDArray[np.uint8] | None:
        """See :meth:`Storage.read_range`."""
        return self._told(super().read_range(name, begin, end))

    def _told(self, data: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
        if data is not None and self.on_read is not None:
            self.on_read(len(data))
        return data


@dataclass(frozen=True, slots=True)
class Stream:
    """The stream that a command is about.

    Args:
        storage: where it lies.
        log: its log.
        out: where the result goes.
    """

    storage: MeteredStorage
    log: StreamLog
    out: Output

    @contextmanager
    def reading(self, doing: str, num_bytes: int) -> Iterator[None]:
        """A progress bar that goes on as bytes are read from the store.

        Args:
            doing: what is being done.
            num_bytes: how many will be read, about.
        """
        with self.out.progress(doing, num_bytes) as progress:
            self.storage.on_read = progress.advance
            try:
                yield
            finally:
                self.storage.on_read = None

    def head(self) -> Manifest:
        """Its newest entry.

        Raises:
            InvalidArgumentError: if there is no stream.
            MalformedError, StorageError: if it cannot be read.
        """
        head = self.log.head()
        if head is None:
            raise InvalidArgumentError(
                "URL", self.storage.url, "No stream is there: check the URL, or start its publisher"
            )
        return head


def stream_command(function: Callable[..., int]) -> Callable[..., int]:
    """Give a click command the argument ``URL`` and the options ``--option`` and ``--json``.

    It stands directly below ``click.command``, above the command's own arguments and options.

    Args:
        function: takes a :class:`Stream`, then the command's own parameters; gives the exit code.
    """

    @functools.wraps(function)
    def wrapped(url: str, options: Sequence[str], *, is_json: bool, **own: object) -> int:
        storage = MeteredStorage(store_url(url), options=store_options(options))
        return function(Stream(storage, StreamLog(storage), Output(is_json=is_json)), **own)

    # As decorators leave them, the last one first: the url comes before the command's own, the options after them.
    own_params = list(getattr(function, "__click_params__", ()))
    wrapped.__click_params__ = [_JSON, _OPTION, *own_params, _URL]  # type: ignore[attr-defined]
    return wrapped


def store_url(url: str) -> str:
    """The url of a store; a plain path names a directory."""
    return url if _SCHEME.match(url) else Path(url).absolute().as_uri()


def store_options(options: Sequence[str]) -> dict[str, str] | None:
    """The settings that ``--option name=value`` gives; None without any.

    Raises:
        InvalidArgumentError: for one without ``=``. It shows the name alone: the value may be a secret.
    """
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InvalidArgumentError("--option", name if equals else "(no = in it)", "Write name=value")
    return {name: value for name, _, value in pairs} or None
