"""Writer of versions to a row store, in an order that allows recovery from a crash at any point.

The steps for each version are:

1. Store a state that marks the version as being applied.
2. Log the changed owners of rows. The log is read only after a crash and in step 6.
3. Write the rows. In a table with raw ids, the key of a row is the raw id that owns it.
4. Delete the rows of raw ids that own no row after the version.
5. Store a state that marks the version as complete. From then on, readers read this version.
6. Copy the log to the stored map of owners, and clear the log.

The stored map therefore always belongs to the last complete version. After a crash before step 5, the rows of raw ids
that are only in the log are deleted. After a later crash, step 6 is repeated.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, MalformedSinkError, MissingTableError, ModelMismatchError
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.predictor.identities import VersionOwners, identities_after, version_owners
from delta_tracker.predictor.placement import Placement
from delta_tracker.predictor.predictor_gauges import PredictorGauges
from delta_tracker.predictor.served_model import Receiver
from delta_tracker.predictor.status import Served
from delta_tracker.raw_ids import NO_OWNER, default_rows
from delta_tracker.row_target import RowTarget
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.format.table_choice import TableChoice
from delta_tracker.stream.interruption import check, checked
from delta_tracker.stream.reading.orders import Order
from delta_tracker.stream.reading.position import Position
from delta_tracker.types import Identity, TableSpec

CHUNK_ROWS = 4096  # maximum number of rows of one write
_SLOTS = 1 << 16  # owners that are read or written at once


class SinkWriter(Forkable):
    """Writer of versions and of the stream position to a row store.

    Writing a version with raw ids takes up to 64 bytes of memory per row of its tables with raw ids. After each error,
    the position is read from the row store again: a request may have succeeded although its response was lost.

    Attributes:
        manifest: manifest of the last applied snapshot or delta; None before the first version.
        identities: buckets that determine the default rows of unknown raw ids, by table FQN.
        written: stored state of the current stream, which readers of the row store read.
        position: stream position of the stored rows; None before the first version.
    """

    is_reading = False  # lookups read the row store
    spec_texts: Mapping[str, str] | None = None
    differences = ()  # a version with other tables is rejected: no row may be older than the stored version

    def __init__(self, sink: RowSink, gauges: PredictorGauges, choice: TableChoice) -> None:
        self.manifest: Manifest | None = None
        self.identities: Mapping[str, Identity] = {}
        self.written = SinkState(stream="")
        self.position: Position | None = None
        self._gauges, self._sink, self._choice = gauges, sink, choice
        self._is_known = False  # False if the row store may have another state
        self.restore()
        protect(self)

    def save_order(self, followed: Order) -> None:
        """Store ``followed``, the last pin or release that the predictor has followed, together with the position."""
        held, state = self.written, self.written.with_order(followed.kind, followed.counter)
        if held.version is None or held.applying is not None or held.is_settling or state == held:
            return  # the log of owners of an interrupted version must not be cleared
        self._is_known = False
        self._sink.clear_owner_log(state)
        self._hold(state)
        self._is_known = True

    def keeps_rows(self, manifest: Manifest, receiver: Receiver | None = None) -> bool:  # noqa: ARG002
        """Return True: the tables of a row store are never replaced."""
        return True

    def notice_move(self) -> bool:
        """Return False: the tables of a row store are never replaced."""
        return False

    def reading(self, *_streams: object) -> AbstractContextManager[Served]:
        """Raise InvalidArgumentError, since lookups use a reader of the row store."""
        raise InvalidArgumentError("reading()", "with a row store", "Use a reader of the row store, such as LmdbRows")

    def state_dict(self) -> dict[str, str | int]:
        """Raise InvalidArgumentError, since the position is in the row store."""
        text = "Omit it: the row store keeps the position with its rows"
        raise InvalidArgumentError("state_dict()", "with a row store", text)

    def load_state_dict(self, state: Mapping[str, str | int]) -> None:
        """Raise InvalidArgumentError, since the position is in the row store."""
        raise InvalidArgumentError("state", state, "Omit it: the row store keeps the position with its rows")

    def after_fork_in_child(self) -> None:
        """Make the next :meth:`restore` open the sink again, which raises an error in a forked process."""
        self._is_known = False

    def restore(self) -> None:
        """If the state is unknown, read it from the row store, and complete or undo an interrupted write."""
        if self._is_known:
            return
        self._sink.open()
        current = self._sink.current()
        states = {state.stream: state for state in self._sink.states()}
        if current is not None and current not in states:
            raise MalformedSinkError(f"its stream {current}", "it has no state")
        if current is not None and states[current].choice != self._choice.patterns:
            known = list(states[current].choice) or None
            remedy = f"Pass {known}, with which the row store began, or another prefix or directory"
            raise InvalidArgumentError("tables", list(self._choice.patterns) or None, remedy)
        for stream in states:
            if stream != current:  # a former one, or one whose first snapshot was interrupted
                self._sink.remove(stream)
        self._hold(SinkState(stream="") if current is None else self._recovered(states[current]))
        self._is_known = True

    def resolve(self, manifest: Manifest) -> Receiver:
        """Return the tables of a version. Raise ModelMismatchError if they differ from the tables in the row store."""
        held = self._held(manifest)
        if self._choice.patterns and manifest.kind == "snapshot" and not manifest.tables:
            raise MissingTableError("tables", self._choice.patterns, "Pass tables: a row store has no dense tensors")
        if held is not None:
            missing = held.tables.keys() - manifest.tables.keys() if manifest.kind == "snapshot" else set()
            for fqn in sorted({*manifest.tables, *missing}):
                _check_table(fqn, manifest, held)
        return Receiver({fqn: _SinkTable(table) for fqn, table in manifest.tables.items()}, {}, {})

    def write(self, receiver: Receiver, contents: Contents, *, is_elsewhere: bool) -> None:
        """Write a version to the row store. See :meth:`ModelWriter.write` for ``is_elsewhere``."""
        manifest = contents.manifest
        former, held = self.written, self._held(manifest)
        identities = identities_after(manifest, {} if held is None else held.identities)
        placements = receiver.placements(contents)
        owners = version_owners(contents) if manifest.identities else {}
        state = held or SinkState(
            stream=manifest.stream, tables=manifest.tables, identities=identities, choice=self._choice.patterns
        )
        begun = _begun(state, manifest, identities, is_elsewhere=is_elsewhere)
        self._is_known = False
        self._sink.begin(begun)
        if held is not None:  # otherwise readers keep the former stream, whose rows do not change
            self._hold(begun)
        with self._gauges.apply_timer():
            changes = self._write(manifest, placements, owners)
        has_changed = any(num_admitted or len(left) for left, num_admitted in changes.values())
        is_settling = has_changed or dict(begun.default_slots) != _defaults(identities)
        finished = replace(begun.finished(manifest), is_settling=is_settling, identities=identities)
        check()
        self._sink.finish(finished)
        if manifest.kind != "claim":
            self.manifest = manifest
        self._gauges.applied(manifest)
        for fqn, (left, num_admitted) in changes.items():  # here, because an attempt that failed is made again
            self._gauges.admitted(fqn, num_admitted)
            self._gauges.evicted(fqn, len(left))
        self._hold(finished)
        if finished.is_settling:
            self._hold(self._settled(finished))
        if former.stream and held is None:
            self._sink.remove(former.stream)
        self._is_known = True

    def _held(self, manifest: Manifest) -> SinkState | None:
        return self.written if self.written.stream == manifest.stream else None

    def _hold(self, state: SinkState) -> None:
        self.written, self.position, self.identities = state, state.position, state.identities

    def _write(
        self, manifest: Manifest, placements: list[Placement], owners: VersionOwners
    ) -> dict[str, tuple[Tensor, int]]:
        ordered = {fqn: _by_slot(*of_table) for fqn, of_table in owners.items()}
        changes = {fqn: self._log(manifest.stream, fqn, *of_table) for fqn, of_table in ordered.items()}
        for placement in placements:
            fqn = placement.rows[0].block.table
            for chunk in checked(placement.chunks(CHUNK_ROWS)):
                ids = chunk.ids
                ids = torch.arange(ids.start, ids.stop, device="cpu") if isinstance(ids, slice) else ids
                ((_, values),) = chunk.values
                if fqn in ordered:
                    self._write_owned(manifest, fqn, ids, values, *ordered[fqn])
                else:
                    self._sink.write(manifest.stream, fqn, ids, values, manifest.version)
                self._gauges.num_rows += chunk.num_rows
        for fqn, (left, _) in changes.items():
            kept = ordered[fqn][1].sort().values
            for some in checked(_pieces(left)):
                self._sink.delete(manifest.stream, fqn, some[~_is_in(some, kept)])
        return changes

    def _write_owned(
        self, manifest: Manifest, fqn: str, ids: Tensor, values: Tensor, slots: Tensor, owners: Tensor
    ) -> None:
        """Write rows (``ids`` ``[N]``) under their owners' raw ids, and default rows under their global row ids.

        ``slots`` are the ``[M]`` global row ids of the whole version, ascending, with ``[M]`` ``owners``.
        """
        found = owners[torch.searchsorted(slots, ids)]
        is_owned = found != NO_OWNER
        if bool(is_owned.any()):
            self._sink.write(manifest.stream, fqn, found[is_owned], values[is_owned], manifest.version)
        is_default = torch.isin(ids, default_rows(manifest.identities[fqn]))
        if bool(is_default.any()):
            self._sink.write_defaults(manifest.stream, fqn, ids[is_default], values[is_default], manifest.version)

    def _log(self, stream: str, fqn: str, slots: Tensor, owners: Tensor) -> tuple[Tensor, int]:
        """Log each of the ``[M]`` ``owners`` that differs from the stored owner of its row. ``slots`` are ascending.

        Returns the int64 raw ids that lose a row (and may get another row), and the number of rows that get a raw id.
        """
        left: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
        num_admitted = 0
        for some, new in checked(zip(_pieces(slots), _pieces(owners), strict=True)):
            old = self._sink.owners(stream, fqn, some)
            is_changed = old != new
            if not bool(is_changed.any()):
                continue
            self._sink.log_owners(stream, fqn, some[is_changed], new[is_changed])
            left.append(old[is_changed & (old != NO_OWNER)])
            num_admitted += int((new[is_changed] != NO_OWNER).sum())
        return torch.cat(left), num_admitted

    def _recovered(self, state: SinkState) -> SinkState:
        """Repeat step 6 for a complete version, or delete the rows of raw ids that only an incomplete version maps."""
        if state.is_settling:
            return self._settled(state)
        has_log = False
        for fqn in state.identities:
            logged = [owners[owners != NO_OWNER] for _, owners in self._sink.logged_owners(state.stream, fqn)]
            has_log = has_log or bool(logged)
            if logged:
                self._undo(state, fqn, torch.cat(logged).unique())  # type: ignore[no-untyped-call]
        if has_log:
            self._sink.clear_owner_log(state)
        return state

    def _undo(self, state: SinkState, fqn: str, raw_ids: Tensor) -> None:
        """Delete the rows of those ``raw_ids`` (``[N]`` int64, ascending) that own no row in the stored map."""
        if not len(raw_ids):
            return
        owned, num_rows = [], state.tables[fqn].num_rows
        for begin in checked(range(0, num_rows, _SLOTS)):
            slots = torch.arange(begin, min(begin + _SLOTS, num_rows), device="cpu")
            owners = self._sink.owners(state.stream, fqn, slots)
            owned.append(owners[_is_in(owners, raw_ids)])
        for some in _pieces(raw_ids[~torch.isin(raw_ids, torch.cat(owned))]):
            self._sink.delete(state.stream, fqn, some)

    def _settled(self, state: SinkState) -> SinkState:
        """Copy the logged owners of a complete version to the stored map, and delete default rows of former buckets."""
        for fqn in state.identities:
            for slots, owners in checked(self._sink.logged_owners(state.stream, fqn)):
                self._sink.set_owners(state.stream, fqn, slots, owners)
        defaults = _defaults(state.identities)
        for fqn, held in state.default_slots.items():
            former = sorted(set(held) - set(defaults.get(fqn, ())))
            if former:
                self._sink.delete_defaults(state.stream, fqn, torch.tensor(former, device="cpu"))
        settled = replace(state, is_settling=False, default_slots=defaults)
        self._sink.clear_owner_log(settled)
        return settled


class _SinkTable(RowTarget):
    """Table of a row store, to which whole rows are written. Only its shape is used."""

    needs_whole_rows = True

    def __init__(self, table: TableSpec) -> None:
        self.num_rows, self.dim, self.dtype = table.num_rows, table.dim, table.dtype
        self.rows, self.columns = (0, table.num_rows), ((0, table.dim),)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Raise NotImplementedError: :class:`SinkWriter` writes the chunks itself."""
        raise NotImplementedError


def _begun(
    state: SinkState, manifest: Manifest, identities: Mapping[str, Identity], *, is_elsewhere: bool
) -> SinkState:
    """Return the state to store before the first row of a version is written.

    If this version is older than the version that readers currently read, the state already contains the number of
    this version as ``version``, because no row may be older than ``version``.
    """
    begun = state.begun(manifest, is_elsewhere=is_elsewhere)
    if state.version is not None and manifest.version < state.version:
        begun = begun.at(manifest)
    defaults = {
        fqn: tuple(sorted({*state.default_slots.get(fqn, ()), *slots})) for fqn, slots in _defaults(identities).items()
    }
    return replace(begun, tables={**state.tables, **manifest.tables}, default_slots={**state.default_slots, **defaults})


_ANEW = "Pass a row store with another prefix or directory, or start a new stream at another url"


def _check_table(fqn: str, manifest: Manifest, held: SinkState) -> None:
    given, stored = manifest.tables.get(fqn), held.tables.get(fqn)
    if given is None or given != stored:
        found, known = (str(given or "missing"), str(stored or "missing")), sorted(held.tables)
        raise ModelMismatchError(fqn, *found, known).with_remedy(_ANEW)
    if (fqn in manifest.identities) != (fqn in held.identities):
        texts = {True: f"{given} with raw ids", False: f"{given} without raw ids"}
        found = texts[fqn in manifest.identities], texts[fqn in held.identities]
        raise ModelMismatchError(fqn, *found).with_remedy(_ANEW)


def _defaults(identities: Mapping[str, Identity]) -> dict[str, tuple[int, ...]]:
    return {fqn: identity.defaults for fqn, identity in identities.items() if identity.defaults}


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values, _SLOTS) if len(values) else ()


def _by_slot(slots: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    slots, order = slots.sort()
    return slots, owners[order]


def _is_in(raw_ids: Tensor, ordered: Tensor) -> Tensor:
    """Return a mask of the raw ids that are in ``ordered``, which is ascending and not empty."""
    indices = torch.searchsorted(ordered, raw_ids).clamp_(max=len(ordered) - 1)
    return ordered[indices] == raw_ids
