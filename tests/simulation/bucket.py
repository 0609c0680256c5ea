"""A bucket in front of a store of a world: the same objects, with the calls and the answers of an object store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delta_tracker.stream.storage.store import Span, Store, StoredObject, Transfer
from tests.simulation.disk import disk

_DRAFT = ".uploads"


class Bucket(Store):
    """Objects as files, which have no folders. A file is written aside and renamed, as an upload is completed.

    Faults of the disk make the errors: a rename that fails is a refused request, and one that fails after it has been
    made is a lost answer.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"s3://bucket/{path.name}"
        self._path = path

    def read(self, span: Span, transfer: Transfer) -> NDArray[np.uint8] | None:
        data = self._data(span.name)
        if data is None:
            return None
        transfer.modified = (self._path / span.name).stat().st_mtime
        return span.of(data)

    def stat(self, name: str) -> StoredObject | None:
        path = self._path / name
        if not path.is_file():
            self._check()
            return None
        found = path.stat()
        return StoredObject(name, found.st_size, found.st_mtime)

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self.replace(name, b"".join(map(bytes, buffers)))

    def create(self, name: str, data: bytes) -> bool:
        if disk().has_conflict():
            return False
        draft = self._draft(name, data)
        try:
            os.link(draft, self._path / name)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._draft(name, data).replace(self._path / name)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        try:
            with os.scandir(self._path / prefix) as entries:
                found = [(f"{prefix}/{each.name}", each.stat()) for each in entries if each.is_file()]
        except FileNotFoundError:
            self._check()
            return []
        return [StoredObject(name, of.st_size, of.st_mtime) for name, of in found if name > after]

    def _data(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self._check()
            return None

    def _check(self) -> None:
        """Raise an error if the store does not answer, as it does for an object that is missing."""
        if not self._path.is_dir():
            raise OSError(f"no answer from {self.url}")

    def _draft(self, name: str, data: bytes) -> Path:
        self._check()
        folder = self._path / _DRAFT
        folder.mkdir(exist_ok=True)
        (self._path / name).parent.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{name.replace('/', '-')}-{len(list(folder.iterdir()))}"
        draft.write_bytes(data)
        return draft
