"""Streams at several urls, and predictors of a model or a row store whose rows are compared with what was published."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, Self

import torch
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.errors import SinkError, StreamError
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.memory_sink import MemorySink, Stored
from tests.stores.rules import fails
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

Kind = Literal["model", "row store"]
KINDS: tuple[Kind, ...] = "model", "row store"

_NUM_ROWS = 20
_NUM_ATTEMPTS = 20  # calls of sync() after which a predictor without faults has reached its target


class Log:
    """A trainer whose published rows are kept by stream and version, and the store that it writes to.

    Args:
        storage: store of the stream.
        rows: rows by stream and version, of this trainer and of others.
    """

    def __init__(self, storage: WrappedStorage, rows: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.storage = storage
        self.rows = {} if rows is None else rows
        self._writer = Writer(storage.inner)
        self._random = torch.Generator().manual_seed(len(self.rows))

    @property
    def stream(self) -> str:
        """Id of the stream."""
        return self._writer.claim.head.stream

    @property
    def newest(self) -> int:
        """Newest version."""
        return self._writer.claim.head.version

    def snapshot(self) -> int:
        """Change a row, publish a snapshot, and return its version."""
        self._writer.change([int(torch.randint(_NUM_ROWS, (), generator=self._random))])
        return self._published(self._writer.snapshot().version)

    def deltas(self, count: int) -> int:
        """Publish deltas of three rows, and return the last version."""
        for _ in range(count):
            rows = torch.randperm(_NUM_ROWS, generator=self._random)[:3].tolist()
            version = self._published(self._writer.delta(sorted(rows)).version)
        return version

    def promoted(self, mirror: WrappedStorage) -> Log:
        """Promote a mirror, and return the trainer that continues there."""
        promote(mirror.inner)
        return Log(mirror, self.rows)

    def _published(self, version: int) -> int:
        self.rows[self.stream, version] = self._writer.table.clone()
        return version


def new_store() -> WrappedStorage:
    """Return an empty store in memory, whose faults are rules."""
    return WrappedStorage(Storage("memory://"))


def lose(storage: WrappedStorage) -> None:
    """Let each operation fail from now on."""
    storage.rules[:] = [fails()]


def mirror(source: WrappedStorage, destination: WrappedStorage, *, up_to: int | None = None) -> None:
    """Copy the entries, claims of promotions and pins that a mirror lacks, up to a version if one is given."""
    copier = Mirror(source.inner, destination.inner)
    while (up_to is None or copier.head is None or copier.head.version < up_to) and copier.step():
        pass
    copier.copy_merged()
    copier.copy_claims()
    copier.copy_pins()


class Reader:
    """A predictor, and the rows that it serves.

    Args:
        kind: what it writes to.
        urls: stores that it reads, in the order of preference.
        published: rows by stream and version.
        stored: row store of a former process.
        options: arguments of the predictor.
    """

    def __init__(
        self,
        kind: Kind,
        urls: list[WrappedStorage],
        published: dict[tuple[str, int], Tensor],
        *,
        stored: Stored | None = None,
        **options: Any,
    ) -> None:
        self.kind: Kind = kind
        self._published, self._options = published, options
        self._table = torch.full((_NUM_ROWS, 4), -1.0)
        self._stored = Stored() if stored is None else stored
        self._sink = MemorySink(self._stored) if kind == "row store" else None
        self.predictor = Predictor(self._sink or {FQN: self._table}, urls, **options)

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Stream and version that the predictor reports."""
        return self.predictor.status().stream, self.predictor.version

    def restarted(self, urls: list[WrappedStorage], **options: Any) -> Self:
        """Return the predictor of another process, which continues with the rows and the saved position of this one.

        Args:
            urls: stores that it reads.
            options: further arguments of the predictor.
        """
        after = type(self)(self.kind, urls, self._published, stored=self._stored, **self._options, **options)
        if self.kind == "model":
            after._table.copy_(self._table)
            after.predictor.load_state_dict(self.predictor.state_dict())
        return after

    def sync(self) -> StreamError | None:
        """Apply what there is, and check the rows. Return the error of the call, None if there was none."""
        error = None
        try:
            self.predictor.sync()
        except StreamError as found:
            error = found
        self.check()
        return error

    def interrupt(self, *, after: int) -> None:
        """Call ``sync()`` of a predictor of a row store that fails after a number of operations."""
        assert self._sink is not None
        self._sink.fails_after = after
        for _ in range(4):  # of which the first may only find that a store fails
            with suppress(StreamError, SinkError):
                self.predictor.sync()
        self._sink.fails_after = None

    def syncs(self, count: int) -> list[int | None]:
        """Call :meth:`sync` several times, and return the version after each call."""
        found = []
        for _ in range(count):
            self.sync()
            found.append(self.predictor.version)
        return found

    def assert_reaches(self, log: Log) -> None:
        """Call :meth:`sync` until the predictor is at the newest version of a stream, without a fault."""
        errors = []
        for _ in range(_NUM_ATTEMPTS):
            errors.append(self.sync())
            if errors[-1] is None and self.place == (log.stream, log.newest):
                return
        text = f"at {self.place} after {_NUM_ATTEMPTS} calls instead of {(log.stream, log.newest)}"
        raise AssertionError(f"{text}: {errors[-1]}")

    def check(self) -> None:
        """Check that the rows are those of the version that the predictor reports."""
        stream, version = self.place
        if stream is None or version is None:
            return
        # A claim has the rows of the version before it.
        newest = max(each for of, each in self._published if of == stream and each <= version)
        assert torch.equal(self.rows(), self._published[stream, newest]), f"not the rows of version {version}"

    def rows(self) -> Tensor:
        """Return the rows that lookups read."""
        if self.kind == "model":
            return self._table
        current = self._stored.current
        assert current is not None
        return torch.stack([self._stored.rows[current, FQN, row][1] for row in range(_NUM_ROWS)])
