"""A file that is appended to without a buffer and without a lock, so that a forked child can let go of it."""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path


class AppendedFile:
    """Text at the end of a file. What :meth:`append` returned from has been handed to the system.

    A file object with a buffer has a lock. If a thread of the parent holds it at a fork, the child hangs when it
    closes the file; if text is in the buffer, the child writes it a second time. This one has neither.

    Args:
        path: the file; nobody else may write to it.
        replace: drop what it holds.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        self._path = Path(path)
        self._file: FileIO | None = self._path.open("wb" if replace else "ab", buffering=0)

    def append(self, text: str) -> None:
        """Write all of ``text``, or leave the file as it was.

        Raises:
            OSError: if that is not possible, such as on a full disk.
        """
        assert self._file is not None, "not called after close"
        data = memoryview(text.encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):  # of a pipe nothing can be taken back; the first error is the cause
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file, which writes nothing; a second call does nothing. Also in a forked child."""
        if self._file is not None:
            self._file.close()
            self._file = None
