"""Files that are written whole and made durable.

Not through obstore, which writes no faster, and which holds the buffers that it was given while it asks for the next.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

# Large enough to cost nothing per chunk, small enough to be copied while it is still in the cache.
CHUNK_BYTES = 4 << 20
# After so many bytes the disk begins to write, so that the sync at the end does not begin with nothing done.
_EARLY_BYTES = 16 << 20


def write_file(directory: Path, name: str, buffers: Iterable[memoryview], *, overwrite: bool, fsync: bool) -> bool:
    """Write under a name of its own, sync, then rename: a name is never seen before its bytes are on disk.

    A process that is killed leaves a file in ``drafts``.

    Returns:
        False if the name exists and was not to be overwritten.

    Raises:
        OSError: if it cannot be written; nothing is visible then.
    """
    target = directory / name
    draft = directory / "drafts" / secrets.token_hex(8)
    for path in (draft, target):
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            begin = end = 0
            for piece in pieces(buffers):
                end += len(piece)
                while piece:
                    piece = piece[os.write(descriptor, piece) :]  # noqa: PLW2901  what is left of it
                if fsync and end - begin >= _EARLY_BYTES:
                    # Linux answers it by starting to write the dirty pages, without waiting, and drops clean ones only.
                    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
                    begin = end
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if overwrite:
            draft.replace(target)
        elif not _link(draft, target):
            return False
    finally:
        draft.unlink(missing_ok=True)
    if fsync:
        # The name itself, and those of the directories above it, which may be new.
        for above in Path(name).parents:
            _fsync(directory / above)
    return True


def make_directory(directory: Path, *, fsync: bool) -> None:
    """Make a directory and those above it, unless they exist.

    Raises:
        OSError: if it cannot be made.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing if fsync else ():
        _fsync(path.parent)


def pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes of ``buffers`` in views that end at multiples of ``CHUNK_BYTES``, and where a buffer ends.

    So a file system can hold them in large pages.
    """
    position = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            piece = rest[: CHUNK_BYTES - position % CHUNK_BYTES]
            yield piece
            position += len(piece)
            rest = rest[len(piece) :]


def _link(draft: Path, target: Path) -> bool:
    """Give a file a second name; False if that is another file's."""
    try:
        target.hardlink_to(draft)
    except FileExistsError:
        if target.is_dir():
            raise
        return False
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
