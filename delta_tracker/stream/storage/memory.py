"""Store in the memory of this process, at ``memory://``."""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from delta_tracker.stream.interruption import checked
from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer


class MemoryStore(Store):
    """Store of objects in a dictionary. Each operation is atomic."""

    is_remote = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects: dict[str, tuple[bytes, float]] = {}

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        found = self._objects.get(span.name)
        if found is None:
            return None
        transfer.modified = found[1]
        return span.of(found[0])

    def stat(self, name: str) -> StoredObject | None:
        found = self._objects.get(name)
        return None if found is None else StoredObject(name, len(found[0]), found[1])

    def put(self, name: str, buffers: Iterable[memoryview]) -> None:
        self.replace(name, b"".join(map(bytes, checked(buffers))))

    def create(self, name: str, data: bytes) -> bool:
        created = bytes(data), time.time()
        return self._objects.setdefault(name, created) is created

    def replace(self, name: str, data: bytes) -> None:
        self._objects[name] = bytes(data), time.time()

    def delete(self, name: str) -> None:
        self._objects.pop(name, None)

    def objects(self, prefix: str, after: str) -> list[StoredObject]:
        folder = f"{prefix}/"
        found = list(self._objects.items())
        return [StoredObject(name, len(of[0]), of[1]) for name, of in found if name > after and name.startswith(folder)]

    def is_same(self, other: Store) -> bool:
        return self is other
