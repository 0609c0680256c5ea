"""A bucket in front of a store of a world: the same objects, with the calls and the answers of an object store."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delta_tracker.stream.storage.store import ByteRange, Store, StoredObject, Transfer
from tests.simulation.disk import disk
from tests.simulation.threads import SCHEDULER

_DRAFT = ".uploads"
_PIECES = 4  # of a slow response with a part; other objects come in one
_LIMIT_SECONDS = 30.0  # for which the library waits for a response of few bytes


class SlowCallError(Exception):
    """Raised in a call of a predictor that does not end."""


@dataclass
class Pace:
    """Speed at which responses of a store arrive at predictors.

    Attributes:
        seconds: time of each piece of a response, 0 if it arrives at once.
        ended: time at which responses were slow last.
        deadline: time after which no read may wait.
    """

    seconds: float = 0.0
    ended: float = -math.inf
    deadline: float = math.inf

    def set(self, seconds: float) -> None:
        """Change the speed."""
        if self.seconds:
            self.ended = SCHEDULER.now
        self.seconds = seconds

    @property
    def is_slow(self) -> bool:
        """True if responses take time. The world itself does not wait, so that it sees one state of a predictor."""
        return self.seconds > 0 and not SCHEDULER.is_alone

    @property
    def slow_at(self) -> float:
        """Last time at which responses were slow."""
        return SCHEDULER.now if self.seconds else self.ended

    def wait(self, began: float) -> None:
        """Wait for a piece of a response that was requested at a time. Raise OSError if it arrives too slowly."""
        if SCHEDULER.now > self.deadline:
            raise SlowCallError("a predictor reads on from a slow store")
        left = began + _LIMIT_SECONDS - SCHEDULER.now
        SCHEDULER.sleep(min(left, self.seconds))
        if self.seconds > left:
            raise OSError("the response arrives too slowly")

    def wait_for_all(self, name: str) -> None:
        """Wait for a whole response. Raise OSError if it arrives too slowly."""
        began = SCHEDULER.now
        for _ in range(_num_pieces(name) if self.is_slow else 0):
            self.wait(began)

    def received(self, data: bytes, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8]:
        """Return the bytes of a response, piece by piece. A failed transfer is continued."""
        assert transfer.modified is not None, "the store has its time"
        source = len(data), str(zlib.crc32(data)), datetime.fromtimestamp(transfer.modified, UTC)
        if transfer.source not in (None, source):
            transfer.out, transfer.num_bytes, transfer.source = None, 0, None
            raise OSError("the object has changed while it was read")
        if transfer.out is None:
            transfer.out, transfer.source = span.memory(len(data)), source
        began, out = SCHEDULER.now, transfer.out
        expected = np.frombuffer(data, dtype=np.uint8)[span.begin : span.begin + len(out)]
        while (first := transfer.num_bytes) < len(out):
            if self.is_slow:
                self.wait(began)
            transfer.num_bytes = min(len(out), first + -(-len(out) // _num_pieces(span.name)))
            out[first : transfer.num_bytes] = expected[first : transfer.num_bytes]
        return out


def _num_pieces(name: str) -> int:
    return _PIECES if name.startswith("parts/") else 1


class Bucket(Store):
    """Objects as files, which have no folders. A file is written aside and renamed, as an upload is completed.

    Faults of the disk make the errors: a rename that fails is a refused request, and one that fails after it has been
    made is a lost answer.
    """

    def __init__(self, path: Path, pace: Pace) -> None:
        self.url = f"s3://bucket/{path.name}"
        self._path, self._pace = path, pace

    def read(self, span: ByteRange, transfer: Transfer) -> NDArray[np.uint8] | None:
        data = self._data(span.name)
        if data is None:
            return None
        transfer.modified = (self._path / span.name).stat().st_mtime
        if self._pace.is_slow or transfer.num_bytes:
            return self._pace.received(data, span, transfer)
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
        parent = (self._path / name).parent  # not with its parents: fails if the bucket is away since the check
        try:
            parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            self._check()
            parent.parent.mkdir(exist_ok=True)
            parent.mkdir(exist_ok=True)
        draft = folder / f"{name.replace('/', '-')}-{len(list(folder.iterdir()))}"
        draft.write_bytes(data)
        return draft
