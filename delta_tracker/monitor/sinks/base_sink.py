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
    """Base class of destinations of metrics and events.

    The collector calls :meth:`deliver` with each collection, in order, one call at a time, in threads of the library.
    It calls :meth:`close` after the last one, even if none was delivered. In a forked child it calls only
    :meth:`forget`.

    If a call raises, the error is counted, and the sink is not called for a while. Only the first error of a sink is
    logged. The windows and events of the collection are delivered again with the next one, so a sink should write a
    collection completely or not at all. For each sink, at most 8192 windows and the monitor's ``capacity`` of events
    are queued. If there are more, the oldest ones are dropped and counted.

    A call that exceeds the collector's deadline counts as an error, and the sink is not called again before that call
    has returned. If the late call does not raise, the collection counts as delivered. If the call never returns, the
    sink is not closed.
    """

    @property
    def name(self) -> str:
        """Name of the sink in log messages and metrics."""
        return type(self).__name__

    @abstractmethod
    def deliver(self, collection: CollectionReport) -> None:
        """Export a collection. The sink must not change the collection, because all sinks share its contents."""

    def close(self) -> None:  # noqa: B027  many sinks have nothing to close
        """Flush and release resources. Called once."""

    def forget(self) -> None:  # noqa: B027
        """Release the resources shared with the parent process, but write nothing. Called in a forked child."""


class FileSink(Sink):
    """Sink that appends to a file. When :meth:`write` returns, the operating system has the text.

    The class has no lock and no buffer. Otherwise, after a fork, a child process would hang at a lock that a thread of
    its parent held, and parent and child would both write the text in a buffer.

    Args:
        path: the file; it must have no other writer. Its folder is created if missing.
        replace: True to truncate the file when it is opened.

    Raises:
        InvalidArgumentError: if the path has a scheme or a leading ~.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        check_path("path", path).parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "w" if replace else "a")

    def append(self, objects: Iterable[object], end: str) -> None:
        """Append each of ``objects`` as JSON, followed by ``end``, as :meth:`write` does."""
        self.write("".join(json.dumps(each, allow_nan=False) + end for each in objects))

    def write(self, text: str) -> None:
        """Append ``text``. If the write raises OSError, truncate the file to its previous length."""
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
        """Close the file without writing. A second call is a no-op. Safe in a forked child."""
        self._file.close()

    def forget(self) -> None:
        """Close the file descriptor in a forked child."""
        self._file.close()
