"""Append-only file without a buffer or a lock, so that a forked child can close it safely."""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path


class AppendedFile:
    """Append-only text file. When :meth:`append` returns, the operating system has the text.

    A buffered file object has a lock and a buffer. If a thread of the parent holds the lock during a fork, the child
    hangs when closing the file. If there is text in the buffer, parent and child both write it. This class has no lock
    and no buffer.

    Args:
        path: the file; it must have no other writer.
        replace: True to truncate the file when it is opened.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        self._path = Path(path)
        self._file: FileIO | None = self._path.open("wb" if replace else "ab", buffering=0)

    def append(self, text: str) -> None:
        """Append ``text``. If the write fails, truncate the file to its previous length.

        Raises:
            OSError: if the write fails, for example on a full disk.
        """
        assert self._file is not None, "not called after close"
        data = memoryview(text.encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe cannot be truncated; raise the first error
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file without writing. A second call is a no-op. Safe in a forked child."""
        if self._file is not None:
            self._file.close()
            self._file = None
