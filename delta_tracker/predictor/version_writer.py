"""Validation and writing of versions, to a model in this process or to a row store: :class:`VersionWriter`."""

from collections.abc import Iterator, Sequence

from delta_tracker.errors import ModelMismatchError, StreamReplacedError
from delta_tracker.predictor.gate import GateKeeper
from delta_tracker.predictor.identities import identities_after, version_owners
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.predictor.served_model import Receiver
from delta_tracker.predictor.sink_writer import SinkWriter
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import Contents, PartBuffer
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.storage.storage import Storage

Destination = ModelWriter | SinkWriter
"""Writer to a model in this process or to a row store."""


class VersionWriter:
    """Writer that reads and validates a whole version, checks it with ``gate``, and then writes it to ``destination``.

    Only the tables and dense tensors that are in ``choice`` and fit the model are read and written. ``left_out`` lists
    the other tables and dense tensors of the last version. If ``cache`` is not None, parts are read through the cache.
    """

    def __init__(
        self, destination: Destination, *, choice: TableChoice, gate: GateKeeper | None, cache: HostCache | None
    ) -> None:
        self.destination = destination
        self.gate = gate
        self.left_out: tuple[str, ...] = ()
        self._choice, self._cache = choice, cache
        self._storage: Storage | None = None  # that the buffer was filled from
        self._buffer = PartBuffer()

    def restart(self) -> None:
        """Discard buffered data. Call this before reading an object again or from another store."""
        self._buffer = PartBuffer()

    def keeps_rows(self, entry: Manifest) -> bool:
        """Return False if a snapshot must be applied because the model changed; see :meth:`ModelWriter.keeps_rows`."""
        narrowed = self._choice.narrowed(entry)
        if not self.left_out:
            self._note(entry, narrowed)
        return self.destination.keeps_rows(narrowed)

    def apply(self, entry: Manifest, storage: Storage, *, is_elsewhere: bool) -> bool:
        """Read, validate and write a version. If a snapshot must be applied first, write nothing and return False."""
        if self.destination.written.leaves_rows(entry):
            raise StreamReplacedError(storage.url, entry.version)
        gate = self.gate if entry.kind != "claim" else None
        try:
            receiver, narrowed = self.resolve(entry)
        except ModelMismatchError:
            if entry.kind != "delta" or self.keeps_rows(entry):
                raise
            return False
        is_compared = entry.kind != "delta" or receiver.spec_texts is self.destination.spec_texts
        if not (is_compared or self.destination.keeps_rows(entry, receiver)):
            return False
        if gate is not None:
            gate.check_not_held(entry)
        contents = self._contents(entry, narrowed, storage)
        measure = {} if gate is None else gate.check(entry, contents)
        if narrowed is not entry or self.left_out:
            self._note(entry, narrowed)  # before the version is stated, so that no thread reads it without these names
        self.destination.write(receiver, contents, is_elsewhere=is_elsewhere)
        if gate is not None:
            gate.passed(entry, measure)
        return True

    def check_path(self, entries: Sequence[Manifest], storage: Storage) -> Iterator[Manifest]:
        """Read and validate versions without writing them. Yield each version before its validation."""
        identities = self.destination.identities
        for entry in entries:
            yield entry
            receiver, narrowed = self.resolve(entry)
            identities = identities_after(narrowed, identities)
            contents = self._contents(entry, narrowed, storage)
            receiver.placements(contents)
            version_owners(contents)

    def write_path(self, entries: Sequence[Manifest], storage: Storage) -> None:
        """Write versions that :meth:`check_path` has validated. Bypasses the gate and replaces its baseline."""
        resolved = [self.resolve(entry) for entry in entries]
        if self.gate is not None:
            self.gate.restart()
        for entry, (receiver, narrowed) in zip(entries, resolved, strict=True):
            contents = self._contents(entry, narrowed, storage)
            self._note(entry, narrowed)
            self.destination.write(receiver, contents, is_elsewhere=entry.kind == "snapshot")
            if self.gate is not None:
                self.gate.passed(entry, self.gate.measure(entry, contents)[0])

    def resolve(self, entry: Manifest) -> tuple[Receiver, Manifest]:
        """Return the receiver of a version, and the entry with only the tables and dense tensors to apply."""
        chosen = self._choice.narrowed(entry)
        try:
            receiver = self.destination.resolve(chosen)
        except ModelMismatchError as error:
            error.with_version(entry.version)
            raise
        return receiver, chosen if receiver.fit is None else receiver.fit.narrowed(chosen)

    def _note(self, entry: Manifest, narrowed: Manifest) -> None:
        if entry.kind != "claim":
            self.left_out = tuple(sorted({*entry.tables, *entry.dense} - {*narrowed.tables, *narrowed.dense}))

    def _contents(self, entry: Manifest, narrowed: Manifest, storage: Storage) -> Contents:
        """Return the contents of a version, read through the host cache if there is one."""
        if storage is not self._storage:  # the buffer may hold a part of the former one
            self._storage, self._buffer = storage, PartBuffer()
        if self._cache is not None:
            storage = self._cache.over(storage, entry)
        return Contents(storage, entry, buffer=self._buffer, narrowed=None if narrowed is entry else narrowed)
