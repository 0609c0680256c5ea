"""Base classes of sinks."""

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from delta_tracker.arguments import check_path
from delta_tracker.monitor.collection_report import CollectionReport


class Sink(ABC):
    """Base class of sinks, the destinations of metrics and events.

    The collector calls :meth:`deliver` for each collection, in a thread of the library. Calls do not overlap. After the
    last collection, the collector calls :meth:`close`, even if no collection was delivered. In a forked child, only
    :meth:`after_fork` is called.

    If a call raises an exception, the error is counted, and the sink is not called again for at least 10 seconds. Only
    the first error of a sink is logged. The next collection contains the undelivered windows and events again, so a
    sink should write a collection completely or not at all. At most 8192 windows and ``capacity`` events (see
    :class:`~delta_tracker.monitor.monitor.Monitor`) are queued for a sink. If more are queued, the oldest are dropped.

    A call that exceeds the monitor's deadline counts as an error, and the sink is not called again until the call
    returns. If the call returns without an exception, the collection counts as delivered. If the call never returns,
    the sink is not closed.
    """

    @property
    def name(self) -> str:
        """Name of the sink in log messages and metrics."""
        return type(self).__name__

    @abstractmethod
    def deliver(self, collection: CollectionReport) -> None:
        """Export ``collection``. Must not modify ``collection``, because all sinks share its contents."""

    def close(self) -> None:  # noqa: B027  many sinks have nothing to close
        """Flush pending data and release resources. Called once."""

    def after_fork(self) -> None:  # noqa: B027
        """Release resources shared with the parent process. Must not write data. Called in a forked child."""


class FileSink(Sink):
    """Base class of sinks that append to a file. Writes are unbuffered.

    The program can be forked at any time. The class has no lock that a child process could inherit while it is held,
    and no buffer that a child process could write a second time.

    Args:
        path: path of the file, which must have no other writer. The folder is created if it is missing.
        replace: True to truncate the file when it is opened.

    Raises:
        InvalidArgumentError: if ``path`` has a scheme or begins with ``~``.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        check_path("path", path).parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "w" if replace else "a")

    def append(self, objects: Iterable[object], end: str) -> None:
        """Append each of ``objects`` as JSON, followed by ``end``; see :meth:`write`."""
        self.write("".join(json.dumps(each, allow_nan=False) + end for each in objects))

    def write(self, text: str) -> None:
        """Append ``text``. If a write fails, truncate the file to its previous length and raise OSError."""
        data = memoryview(text.encode())
        length = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe cannot be truncated; raise the first error
                self._file.truncate(length)
            raise

    def close(self) -> None:
        """Close the file without writing. No-op if already closed. Safe in a forked child."""
        self._file.close()

    after_fork = close  # not the close() of a subclass, which may write
