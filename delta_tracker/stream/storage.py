"""Objects in a directory or bucket, through obstore: written whole, created once, never half visible."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from delta_tracker.errors import InvalidArgumentError, MalformedError, StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore.store import ObjectStore

_SCHEMES = ("file", "memory", "s3", "gs", "az")
# Large enough to cost nothing per chunk, small enough to be copied while it is still in the cache.
_CHUNK_BYTES = 4 << 20


class Storage:
    """The objects under one url.

    Names are relative, with forward slashes. A local directory is made durable: an object is on disk (fsync) before
    the call that wrote it returns. An object store promises that by itself.

    Args:
        url: ``file:///absolute/directory``, ``s3://bucket/prefix``, ``gs://...``, ``az://...`` or ``memory://``.
            Every ``memory://`` is a store of its own: share the ``Storage`` object instead of the url.
        create: make a local directory that does not exist. Without it a missing one is an empty store until somebody
            makes it, so that a reader may start before the writer.

    Raises:
        InvalidArgumentError: for a url of another scheme.
        StorageError: if the store cannot be opened.
    """

    def __init__(self, url: str, *, create: bool = False) -> None:
        if not isinstance(url, str):
            raise InvalidArgumentError("url", url, "Pass a string; of a path, path.absolute().as_uri()")
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            raise InvalidArgumentError("url", url, "Leave ? and # out of it")
        if parts.scheme not in _SCHEMES:
            raise InvalidArgumentError("url", url, f"Give it one of the schemes {', '.join(_SCHEMES)}")
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            raise InvalidArgumentError("url", url, "Write an absolute directory as file:///directory")
        self.url = url
        self._directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        with self._translated():
            if self._directory is not None and create:
                self._directory.mkdir(parents=True, exist_ok=True)
            self._store: ObjectStore | None = None
            self._find_store()

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        """Write an object of the concatenated ``buffers``, replacing one of the same name.

        Raises:
            StorageError: if it cannot be written; nothing is visible then.
        """
        with self._translated():
            obstore.put(self._open_store(), name, iter(buffers))
            self._persist(name)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one of that name exists; False if it does. Of racing writers exactly one wins.

        Raises:
            StorageError: if it cannot be written; it may be there all the same when the answer was lost.
        """
        with self._translated():
            try:
                if self._directory is None:
                    obstore.put(self._open_store(), name, data, mode="create")
                else:
                    self._create_durably(name, data)
            except AlreadyExistsError:
                return False
            return True

    def read(self, name: str, *, max_bytes: int) -> NDArray[np.uint8] | None:
        """The bytes of an object, None if there is none.

        Raises:
            MalformedError: if it has more than ``max_bytes``; nothing was allocated for them.
            StorageError: if it cannot be read.
        """
        with self._translated():
            store = self._find_store()
            if store is None:
                return None
            try:
                answer = obstore.get(store, name)
            except FileNotFoundError:
                return None
            num_bytes = answer.meta["size"]
            if num_bytes > max_bytes:
                raise MalformedError(name, f"it has {num_bytes} bytes, more than {max_bytes}")
            data = np.empty(num_bytes, dtype=np.uint8)
            end = 0
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                begin, end = end, end + len(chunk)
                if end > num_bytes:
                    break
                data[begin:end] = np.frombuffer(chunk, dtype=np.uint8)
            if end != len(data):
                raise StorageError(self.url, f"{name} ended after {end} of {len(data)} bytes")
            return data

    def names(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Names of the objects below ``prefix``, ascending, those above ``after`` only.

        Raises:
            StorageError: if the store cannot be listed.
        """
        with self._translated():
            store = self._find_store()
            if store is None:
                return []
            return sorted(found["path"] for page in obstore.list(store, prefix, offset=after) for found in page)

    def _find_store(self) -> ObjectStore | None:
        """The store; None while its directory does not exist."""
        if self._directory is not None and self._directory.exists() and not self._directory.is_dir():
            raise StorageError(self.url, "a file stands where its directory should be")
        if self._store is None and (self._directory is None or self._directory.is_dir()):
            self._store = from_url(self.url)
        return self._store

    def _open_store(self) -> ObjectStore:
        store = self._find_store()
        if store is None:
            raise StorageError(self.url, "the directory does not exist")
        return store

    def _create_durably(self, name: str, data: bytes) -> None:
        """Write under a name of its own, sync, then link: a name is never seen before its bytes are on disk."""
        draft = f"drafts/{secrets.token_hex(8)}"
        store = self._open_store()
        obstore.put(store, draft, data)
        self._persist(draft)
        try:
            obstore.rename(store, draft, name, overwrite=False)
        except AlreadyExistsError:
            obstore.delete(store, draft)
            raise
        self._sync_directory(name)

    def _persist(self, name: str) -> None:
        if self._directory is not None:
            _fsync(self._directory / name)
            self._sync_directory(name)

    def _sync_directory(self, name: str) -> None:
        assert self._directory is not None
        _fsync((self._directory / name).parent)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what obstore and the file system raise into a :class:`StorageError`."""
        try:
            yield
        except (StorageError, MalformedError):
            raise
        except (BaseError, OSError) as error:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise StorageError(self.url, f"{type(error).__name__}: {reason}") from error


def open_storage(url: str | Storage, *, create: bool = False) -> Storage:
    """``url`` itself if it is a :class:`Storage`, otherwise the storage it names."""
    return url if isinstance(url, Storage) else Storage(url, create=create)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
