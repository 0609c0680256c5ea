"""Base class of the sinks that append JSON objects to a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from delta_tracker.monitor.sinks.sink import Sink


class FileSink(Sink):
    """Sink that appends to a file. When :meth:`write` returns, the operating system has the text.

    A buffered file object has a lock and a buffer. If a thread of the parent holds the lock during a fork, the child
    hangs when closing the file. If there is text in the buffer, parent and child both write it. This class has no lock
    and no buffer.

    Args:
        path: the file; it must have no other writer. Its folder is created if missing.
        replace: True to truncate the file when it is opened.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "w" if replace else "a")

    def append(self, objects: Iterable[object], end: str) -> None:
        """Append each of ``objects`` as JSON, followed by ``end``, as :meth:`write` does."""
        self.write("".join(json.dumps(each, allow_nan=False) + end for each in objects))

    def write(self, text: str) -> None:
        """Append ``text``. If the write fails, truncate the file to its previous length.

        Raises:
            OSError: if the write fails, for example on a full disk.
        """
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
