"""Write versions to a model in this process that serves lookups: :class:`ModelWriter`."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from delta_tracker.errors import FollowEndedError, InvalidArgumentError
from delta_tracker.predictor.identities import (
    OwnerChange,
    default_chunks,
    identities_after,
    owner_changes,
    set_saved_identities,
    version_owners,
)
from delta_tracker.predictor.lock import TableFence, TableLock
from delta_tracker.predictor.model_fit import MISSING, difference, spec_texts
from delta_tracker.predictor.placement import Chunk, Placement
from delta_tracker.predictor.predictor_gauges import PredictorGauges
from delta_tracker.predictor.served_model import ModelTarget, Receiver, ServedModel
from delta_tracker.predictor.status import Served
from delta_tracker.stream.format.field_types import Count
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.reading.orders import Order
from delta_tracker.stream.reading.position import Position, Rows, SavedPosition, Written
from delta_tracker.types import Identity

_logger = logging.getLogger(__name__)


class _Saved(SavedPosition):
    """Saved position, and the counter of the pin or release that was followed last."""

    pin: Count = 0
    release: Count = 0

    def __post_init__(self) -> None:
        if self.pin and self.release:
            raise ValueError("two last orders")


class ModelWriter:
    """Writer of versions to one model in this process. The model stays available for lookups.

    Only one thread at a time may call the methods, except :meth:`reading`. Any thread may read the attributes.

    Attributes:
        manifest: manifest of the last applied snapshot or delta; None before the first version.
        identities: buckets that determine the default rows of unknown raw ids, by table FQN.
        written: versions that were written. While the predictor changes to another stream, this attribute describes the
            previous stream, with ``is_mixed=True``.
        position: stream position of the tables; None before the first version.
        spec_texts: spec in the model, as text, of each table and dense tensor that was applied, by name in the stream;
            None if unknown.
        differences: sentences about differences between the model and the last version; see :class:`Status`.
        resolve, notice_move: methods of the :class:`ServedModel`.
    """

    def __init__(self, target: ModelTarget, gauges: PredictorGauges, choice: TableChoice) -> None:
        self.manifest: Manifest | None = None
        self.identities: Mapping[str, Identity] = {}
        self._gauges = gauges
        self.lock, self.fence, self.model = TableLock(), TableFence(), ServedModel(target, choice)
        self.resolve, self.notice_move = self.model.resolve, self.model.notice_move
        self.fence.cover(self.model.first_devices)
        self.written = Written(stream="")
        self.position: Position | None = None
        self._has_newer_rows = False  # rows that were saved after the position, until a snapshot replaces them
        self._applying: int | None = None  # last version of which rows were written, until it is complete
        self.spec_texts: Mapping[str, str] | None = None
        self.differences: tuple[str, ...] = ()

    @property
    def is_reading(self) -> bool:
        """True if the calling thread is inside :meth:`reading`."""
        return self.lock.is_reading

    @contextmanager
    def reading(self, *streams: torch.cuda.Stream) -> Iterator[Served]:
        """Context manager that blocks writes during lookups, and yields the versions that the tables contain."""
        with self.lock.reading():
            if self.lock.is_torn:
                raise FollowEndedError("rows were being written and may be torn", "Call sync() in this process first")
            written, applying = self.written, self._applying
            # After a change of the model, its tables have no version until a snapshot is applied.
            served = Served(None if written.is_mixed and applying is None else written.version, applying)
            if not self.fence.devices and not streams:  # all tables are on the CPU
                yield served
                return
            used = self.fence.enter_reading(streams)
            try:
                yield served
            finally:
                self.fence.leave_reading(used)

    def save_order(self, followed: Order) -> None:
        """Record ``followed``, the last pin or release that the predictor has followed, for :meth:`state_dict`."""
        self._hold(self.written.with_order(followed.kind, followed.counter))

    def restore(self) -> None:
        """No-op: the position in memory is always valid, even after an interrupted write."""

    def keeps_rows(self, manifest: Manifest, receiver: Receiver | None = None) -> bool:
        """Return True if the tensors of the model still have the sizes that they had when rows were applied.

        Return False if a size differs or the previous sizes are unknown. Only a snapshot can then be applied next.
        ``manifest`` is the entry at the position or the next delta. ``receiver`` is ``resolve(manifest)``, if known.
        """
        own, held = self.model.spec_texts(manifest) if receiver is None else receiver.spec_texts, self.spec_texts
        if held is None and not self.model.continues:  # saved without sizes: all that the stream has fitted
            held = spec_texts({**manifest.dense, **manifest.tables}, manifest.identities)
        changed = [
            f"{name!r} was {held[name]} and is {own[name]}"
            for name in own
            if held and name in held and held[name] != own[name]
        ]
        if held is not None and not changed:
            return True
        what = ", ".join(changed) or "their former sizes were not saved"
        _logger.warning("a snapshot is applied next, because the model changed: %s", what)
        with self.lock.writing():
            self._hold(replace(self.written, is_mixed=True))
        return False

    def write(self, receiver: Receiver, contents: Contents, *, is_elsewhere: bool) -> None:
        """Write a version to ``receiver``. Set the position to this version when all rows are written.

        Pass ``is_elsewhere=True`` if the version may not descend from the version in the tables. If such a write is
        interrupted, only the same version or a snapshot can be applied next.
        """
        manifest = contents.manifest
        has_raw_ids = bool(manifest.identities or self.identities)
        identities = identities_after(manifest, self.identities) if has_raw_ids else {}
        placements = receiver.placements(contents)
        changes: list[OwnerChange] = []
        default_rows: list[Chunk] = []
        if manifest.identities:
            self.fence.enter_reading()  # the owners are read on the current stream
            changes = owner_changes(version_owners(contents), manifest.identities, receiver.raw_ids)
            default_rows = default_chunks(contents, changes, receiver.targets)
        with self.lock.writing():
            self.fence.cover(receiver.devices)
            begun = self._begin(manifest, is_elsewhere=is_elsewhere)
            if changes:
                self._unmap(changes, default_rows)
        self.write_rows(placements)
        for change in changes:
            self._map(change)
        with self.lock.writing(), self.fence.writing():
            receiver.write_dense(contents)
            if manifest.kind != "claim" and receiver.spec_texts is not self.spec_texts:
                self._compare(receiver)
            self._has_newer_rows = self._has_newer_rows and manifest.kind != "snapshot"
            self._hold(begun.finished(manifest))
            self._applying = self.written.applying
            self.lock.is_torn = self.lock.is_torn and self._applying is not None
            if manifest.kind != "claim":
                self.manifest, self.identities = manifest, identities
        self._gauges.applied(manifest)

    def write_rows(self, placements: Iterable[Placement]) -> None:
        """Write the rows of ``placements`` in chunks. Lookups may run between two chunks."""
        with self._gauges.apply_timer():
            for placement in placements:
                for chunk in placement.chunks(self.model.chunk_rows):
                    with self.lock.writing(), self.fence.writing():
                        chunk.write()
                    self.fence.throttle()
                    self._gauges.num_rows += chunk.num_rows

    def state_dict(self) -> dict[str, str | int]:
        """Return the stream position of the tables; see :meth:`Predictor.state_dict`."""
        written = self.written
        position: dict[str, str | int] = {}
        if written.version is not None and not written.is_mixed:
            fields = {name: getattr(written, name) for name in _Saved.__struct_fields__}
            position = msgspec.to_builtins(_Saved(**{**fields, "created": written.saved_created}))
            # Also after a load, because a predictor that continued may have saved them.
            if self.spec_texts is not None and (self.model.continues or self.manifest is None):
                position["model"] = msgspec.json.encode(self.spec_texts).decode()
        # Without a position too: until the snapshot is applied, unknown raw ids read the default rows of these buckets.
        if self.identities:
            position["identities"] = msgspec.json.encode(self.identities).decode()
        return position

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Restore the stream position of tables that were saved together with ``state``."""
        try:
            fields = dict(state)
            identities = msgspec.json.decode(str(fields.pop("identities", "{}")), type=dict[str, Identity])
            specs = msgspec.json.decode(str(fields.pop("model", "null")), type=dict[str, str] | None)
            saved = msgspec.convert(fields, _Saved) if fields else None
            written = Written(stream="") if saved is None else Written(**msgspec.structs.asdict(saved))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError("state", state, "Pass what state_dict() returned") from error
        with self.lock.writing():
            if identities:
                with self.fence.writing():
                    set_saved_identities(identities, self.model.raw_ids())
            self.identities = identities
            self.manifest, self.spec_texts, self.differences = None, specs, ()
            self._has_newer_rows, self._applying, self.lock.is_torn = True, None, False
            self._hold(written)

    def _compare(self, receiver: Receiver) -> None:
        """Record and log the differences between the model and the version that was written."""
        held = self.spec_texts or {}
        found = [] if receiver.fit is None else list(receiver.fit.differences.values())
        found += [
            f"{difference(kind, name, MISSING, spec)}: it keeps its values"
            for name, spec in held.items()
            if spec != MISSING and name not in receiver.spec_texts and (kind := self.model.kind_of(name, receiver))
        ]
        for each in found:
            if each not in self.differences:
                _logger.warning("the model differs from the stream: %s", each)
        texts = receiver.spec_texts
        self.differences, self.spec_texts = tuple(found), {**held, **texts} if held.keys() - texts else texts

    def _unmap(self, changes: Sequence[OwnerChange], default_rows: Iterable[Chunk]) -> None:
        """Unmap the raw ids of all rows whose owner changes. The caller must hold the lock for writing."""
        with self.fence.writing():
            for change in changes:
                # Counted here: a second attempt does not find the raw ids that a failed one has removed.
                if num_evicted := change.unmap():
                    self._gauges.evicted(change.fqn, num_evicted)
            for chunk in default_rows:
                chunk.write()
            for change in changes:
                change.raw_ids.set_identity(change.identity)
                self.identities = {**self.identities, change.fqn: change.identity}

    def _map(self, change: OwnerChange) -> None:
        if not len(change.slots):
            return
        self.fence.enter_reading()
        ready = change.raw_ids.prepare(change.final)  # lookups may run meanwhile
        with self.lock.writing(), self.fence.writing():
            # Only a snapshot has all raw ids of a mapping that is half written.
            written = self.written
            self._hold(replace(written, is_mixed=True))
            change.raw_ids.map(ready)
            self._hold(written)
        self._gauges.admitted(change.fqn, change.num_admitted())

    def _begin(self, manifest: Manifest, *, is_elsewhere: bool) -> Written:
        held = self.written
        of_stream = held if held.stream == manifest.stream else Written(stream=manifest.stream)
        begun = of_stream.begun(manifest, is_elsewhere=is_elsewhere)
        is_other = held.version is not None and held.stream != manifest.stream
        self._hold(replace(held, is_mixed=True) if is_other else begun)
        self._applying = manifest.version
        return begun

    def _hold(self, written: Written) -> None:
        position = written.position
        if position is not None and position.rows is Rows.WHOLE and self._has_newer_rows:
            position = replace(position, rows=Rows.AHEAD)
        self.written, self.position = written, position
