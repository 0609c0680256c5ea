"""Read the rows of a version from the tracker, and commit or abort the read afterwards."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, MissingStepError, RankLostError, StaleDeltaError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.exchange import Exchange, Message, Phase
from delta_tracker.publisher.host_copies import Source
from delta_tracker.publisher.repair import rows_to_repair
from delta_tracker.publisher.row_gatherer import EncodingChoice, Gatherer, choose_encodings
from delta_tracker.publisher.training import ConsumerState, Stateful, TrainingSource
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sharding.dense import dense_tensors
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import (
    DTYPE_NAMES,
    FORMAT,
    MAX_DIMS,
    STATES_FORMAT,
    Kind,
    Manifest,
    Part,
    Schema,
)
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Position
from delta_tracker.tracker.checkpoint.tracker_checkpoint import Restored
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from delta_tracker.tracker.top_k import AllRanks, TopK, choose
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, Identity, TableSpec, TableStates

_logger = logging.getLogger(__name__)

_TESTED = frozenset({"EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"})
# Longest waits of training for an update in progress: the first one, and those after a wait that was in vain. A graph
# that the training thread itself holds does not end while it waits.
_UPDATE_SECONDS = 5.0
_AGAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """The user's objects whose states are in each version.

    Args:
        shared: name to object with the same state on every rank, of which rank 0's state is written.
        per_rank: name to object with a state of its own on each rank.
    """

    shared: Mapping[str, Stateful]
    per_rank: Mapping[str, Stateful]


_Schema = tuple[Mapping[str, TableStates], Mapping[str, Identity], Mapping[str, TableSpec]]


class VersionSource:
    """Component that reserves a consumer of a tracker and reads the rows of each version.

    Only the training thread may call the methods.

    Args:
        tracker: tracker of the rows.
        consumer: name of the consumer; None if the tracker has only one.
        top_k: bound on the rows of a delta; None for all changed rows.
        dense: module whose dense tensors are in each version, or names of dense tensors in the model's ``state_dict``;
            None for no dense tensors.
        encoding: encoding of all tables, or FQN to encoding. Tables without an encoding are stored in their own dtype.
        exchange: communication with the other ranks. All ranks share the budget of ``top_k``. Only rank 0 writes
            replicated tables and dense tensors.
        recorder: records the time of reads and encodings.
        training: objects whose states are in each version, together with the states of the fused optimizers; None for
            versions of values only.

    Raises:
        UnknownConsumerError: if the tracker has no such consumer, or ``consumer`` is None and it has several.
        ReservedConsumerError: if the consumer is already reserved.
        DetachedError: if the tracker is detached.
        InvalidArgumentError: if ``dense`` or ``encoding`` is invalid for the model, or if ``top_k`` has no score
            function and the tracking mode has no default score.
    """

    def __init__(
        self,
        tracker: ModelDeltaTracker,
        consumer: str | None,
        *,
        top_k: TopK | None,
        dense: nn.Module | Iterable[str] | None,
        encoding: EncodingChoice,
        exchange: Exchange,
        recorder: Recorder,
        training: Training | None = None,
    ) -> None:
        self._tracker = tracker
        self._top_k = top_k
        self._dense_choice = dense if dense is None or isinstance(dense, nn.Module | str) else tuple(dense)
        self._is_first = exchange.rank == 0
        self._ranks = AllRanks(exchange.group)
        self._encoding = encoding
        encodings = choose_encodings(encoding, tracker)
        if training is not None:
            _check_recoverable(tracker, encodings, top_k)
        self._has_states = has_states = training is not None
        self._gatherer = Gatherer(tracker, encodings, writes_replicas=self._is_first, with_states=has_states)
        self._dense()
        self._num_attached = 0
        self._is_compared = True  # only a cut finds some of the changes
        self._schema: _Schema = {}, {}, {}
        self._collisions: Mapping[str, nn.Module] = {}
        self.handle = tracker.reserve(consumer, holder="Publisher")
        try:
            self.handle.check_top_k(top_k)
            self._training = None if training is None else self._training_source(training)
        except BaseException:
            self.handle.release()
            raise
        self._read_timer = recorder.read_seconds.timer(consumer=self.handle.name)
        self._encode_timer = recorder.encode_seconds.timer()
        self._meanwhile: ConsumerHandle | None = None  # second consumer, for changes while a snapshot is copied
        self._has_snapshot = self._is_repairing = False
        self._watch = tracker.watch_states() if has_states else None
        self._waited_in_vain = False
        # Updates before the first step, such as a warm-up, belong to the state from which training begins.
        self._start = tracker.num_batches, tracker.num_unstepped
        self._trained: tuple[int, int] | None = None  # the same numbers at the cut of the last version, if it compares
        # The schema of the last snapshot, and of the one that is being copied.
        self._published = self._copying = self.schema
        if untested := sorted({each.optimizer for each in self.states.values()} - _TESTED):
            _logger.warning("the published states of these optimizers have not been tested: %s", ", ".join(untested))
        self._cuts: list[tuple[int, int]] = []  # log position and version of earlier cuts, ascending

    @property
    def schema(self) -> _Schema:
        """States of this rank's column ranges, empty if the versions have none, identities, and tables, by FQN.

        A version with another schema than the version before must be a snapshot.
        """
        if self._num_attached != self._tracker.num_attached:
            self._attach()
        return self._schema

    @property
    def states(self) -> Mapping[str, TableStates]:
        """States of this rank's column ranges, by FQN; empty if the versions have no states."""
        return self.schema[0]

    @property
    def needs_snapshot(self) -> bool:
        """True if the next version must be a snapshot. Call :meth:`place` first, which finds new shards."""
        return not self._has_snapshot or self.handle.needs_snapshot or self._schema != self._published

    @property
    def is_repairing(self) -> bool:
        """True if the next delta must have all pending rows, without ``top_k``, because it repairs earlier versions."""
        return self._is_repairing

    @property
    def num_batches(self) -> int:
        """Number of batches of this rank."""
        return self._tracker.num_batches

    @property
    def has_changes(self) -> bool:
        """True if the stream lacks something of this rank: a snapshot, pending rows, or what only a cut can compare.

        Tables without a fused optimizer, dense tensors and states are compared by the next cut, if training advanced.
        Waits for the device.
        """
        if self.needs_snapshot or any(self._tracker.num_pending(self.handle.name).values()):
            return True
        return self._is_compared and self._trained != (self._tracker.num_batches, self._tracker.num_unstepped)

    @property
    def format(self) -> int:
        """Format of the next version."""
        return FORMAT if self._training is None and not self.schema[1] else STATES_FORMAT

    @property
    def layout(self) -> int:
        """Number that changes when the shards of this rank may have changed."""
        return self._num_attached

    def place(self) -> tuple[int, Mapping[str, TableSpec], Mapping[str, Identity]]:
        """Return the number of batches of this rank, its tables, and their identities."""
        return self._tracker.num_batches, self._tracker.tables, self.schema[1]

    def resume(self, exchange: Exchange, writer: Coordinator) -> None:
        """Make the rows of all versions after the loaded checkpoint pending, so that the next version repairs them.

        If a rank has no checkpoint or cannot find these rows, the next version must be a snapshot instead. So it must
        be if the versions have states, and the model was not restored from a stream: the states of the rows that are
        not pending may be others than those in the stream. A collective.

        Args:
            exchange: communication with the other ranks.
            writer: coordinator that has claimed the stream, and that knows the states of all ranks.

        Raises:
            StorageError: if this rank cannot read the store.
            PublishError: if another rank failed.
            RankLostError: if a rank died or did not answer in time.
        """
        tracker = self._tracker
        rows: dict[str, Tensor] | None = None

        def find() -> dict[str, Any]:
            nonlocal rows
            # If rows were read from the consumer since the load, no version contains them: the position is invalid.
            note = self.handle.note if self.handle.is_as_restored else None
            if self._training is not None and tracker.restored is not Restored.STREAM:
                note = None  # a checkpoint may have been loaded without the optimizer's states
            schema: Schema = self.format, tracker.tables, writer.states, self.schema[1]
            rows = rows_to_repair(StreamLog(writer.storage), note, writer.head, schema, tracker.shards)
            return {"knows": rows is not None}

        if all(vote["knows"] for vote in exchange.exchange(Phase.RESUMING, Message.of(find))) and rows is not None:
            for fqn, ids in rows.items():
                self.handle.distrust(fqn, ids)
            self._has_snapshot = self._is_repairing = True
            if self._training is not None and isinstance(self.handle.note, Mapping):
                self._cuts = [(self.handle.position, Position.from_dict(self.handle.note).version)]
        self._note(writer.head)

    def copy(self) -> list[BlockRows]:
        """Start to track changes made during a snapshot, and return all rows of the tables with a fused optimizer.

        Each chunk of rows is copied when it is read.
        """
        if self.handle.needs_snapshot:
            # The pending rows were dropped: until this snapshot is committed, a resumed trainer needs a snapshot too.
            self._has_snapshot = False
            self.handle.annotate(None)
            self.handle.clear()
        if self._meanwhile is not None:  # left by an interrupted call
            self._meanwhile.release()
        self._meanwhile = self.handle.begin_copy()
        self._copying = self.schema
        with one_cut():
            return self._gatherer.whole(self._tracker.fused_tables, self._owners())

    def cut(self, kind: Kind, copied: Part | None, *, is_complete: bool = False) -> tuple[Draft, Delta]:
        """Read the rows of a version with their current values.

        The read of a delta with ``top_k`` is a collective. If a rank raises before it reaches the read, it must call
        :meth:`fail_expected_read`.

        Args:
            kind: ``"snapshot"`` or ``"delta"``.
            copied: for a snapshot, the part with the rows that :meth:`copy` returned; None if there are no such rows.
            is_complete: for a delta, True to read all rows, without ``top_k``. It must be the same on every rank.

        Returns:
            The contents of the version, and the uncommitted read for :meth:`end`.

        Raises:
            UpdateInProgressError: if the version has states and an update is still in progress after the wait.
            MissingStepError: if it has states and rows were updated since the last step of the tracker.
            InvalidArgumentError: if an object's state cannot be published, or if the tables were resharded while the
                version was copied.
        """
        tracker = self._tracker
        self._trained = (tracker.num_batches, tracker.num_unstepped) if self._is_compared else None
        schema = self.schema
        if schema != (self._copying if kind == "snapshot" else self._published):
            raise InvalidArgumentError("tracker", "resharded", "Publish again: the next version is a snapshot")
        if self._training is not None:
            self._prepare()
        # Otherwise the stream has other raw ids than those of the consumer's last read.
        counted = schema[1] if self._has_snapshot and not self._is_repairing and schema == self._published else ()
        with one_cut():
            dense = self._dense()
            # First, because it calls the user's code, which may raise.
            taken = None if self._training is None else self._training.take(self._consumers(), dense)
            extra = [] if taken is None else [*taken.sources]
            num_taken = len(extra)
            if kind == "snapshot":
                # The rows that changed during the copy. Tables without a fused optimizer are copied whole only now:
                # their changes are found by comparison, which misses a value that changed and then changed back.
                assert self._meanwhile is not None, "copy() came first"
                # Not committed, because an interrupted cut is repeated and must find the same rows.
                changed = self._meanwhile.read(commit=False, with_states=False)
                read = self.handle.read(commit=False, with_states=False)
                counts = _count_owner_changes(read, counted) if counted else {}
                compared = frozenset(tracker.tables) - tracker.fused_tables
                extra.extend(map(Source, counts.values()))
                owners = self._owners() if schema[1] else {}
                gathered = self._gatherer.gather(changed, whole=compared, dense=dense, extra=extra, owners=owners)
            else:
                top_k = None if is_complete else self._top_k
                with self._read_timer():
                    read = self.handle.read(commit=False, with_states=False, top_k=top_k, ranks=self._ranks)
                with self._encode_timer():
                    counts = _count_owner_changes(read, counted) if counted else {}
                    extra.extend(map(Source, counts.values()))
                    owners = self._owners() if schema[1] else {}
                    gathered = self._gatherer.gather(read, dense=dense, extra=extra, owners=owners)
        draft = Draft(
            kind=kind,
            batches=read.batches,
            cut=time.time(),
            tables=dict(tracker.tables),
            pending_rows=read.pending_rows,
            parts=[] if copied is None else [copied],
            rows=gathered.rows,
            dense=gathered.dense,
            copies=gathered.copies,
            states=None if taken is None else schema[0],
            training=taken,
            training_tensors=gathered.extra[:num_taken],
            identities=schema[1],
            owner_changes=dict(zip(counts, gathered.extra[num_taken:], strict=True)) if counted else None,
            format=FORMAT if taken is None and not schema[1] else STATES_FORMAT,
            layout=self._num_attached,
            # A restore takes the pending rows of the other consumers from the rows of the versions. Such a consumer may
            # have read a row between two versions in which the row is equal.
            needs_all_rows=taken is not None and bool(self.handle.others()),
        )
        return draft, read

    def expect_read(self, *, is_complete: bool) -> None:
        """Note that all ranks begin a delta, so that they wait for this rank in a read with ``top_k``.

        Args:
            is_complete: as in :meth:`cut`.
        """
        self._ranks.is_expected = self._top_k is not None and not is_complete

    def fail_expected_read(self) -> None:
        """Fail the read with ``top_k`` in which the other ranks wait for this one. No-op if they do not wait.

        They wait if this rank failed or was interrupted before its own read. Call this method before any other
        collective. The read then raises InvalidArgumentError on the other ranks.
        """
        if self._ranks.is_expected and self._top_k is not None:
            with suppress(_UnreadError, RankLostError):  # a lost rank is reported by the next collective
                choose(self._top_k, _UnreadError(), list(self._tracker.shards), self._ranks)

    def end(self, read: Delta | None, committed: Manifest | None) -> None:
        """Commit or abort the read of a version.

        Args:
            read: the read that :meth:`cut` returned; None if the version failed earlier.
            committed: manifest of the version; None if the version failed, so that its rows stay pending.
        """
        if committed is None:
            self._trained = None
        else:  # first, so that the flags are equal on all ranks even if the code below fails
            self._has_snapshot, self._is_repairing = True, False
            if committed.kind == "snapshot":
                self._published = self._copying
            if read is not None and self._training is not None:
                self._cuts.append((read.stop, committed.version))
        if self._meanwhile is not None:
            self._meanwhile.release()
            self._meanwhile = None
        if read is not None:
            try:
                (self.handle.abort if committed is None else self.handle.commit)(read)
            except StaleDeltaError:
                _logger.warning("the tracker was attached again while a version was written; its rows are sent again")
        if committed is not None:
            self._note(committed)

    def close(self, *, forgets: bool) -> None:
        """Release the consumer.

        Args:
            forgets: True to remove the consumer's stream position from the tracker's state, because the stream will
                miss the rows of later reads.
        """
        if forgets and not self.handle.is_released:  # an earlier call may have been interrupted
            self.handle.annotate(None)
        if self._meanwhile is not None:  # left by an interrupted call
            self._meanwhile.release()
        self.handle.release()

    def _note(self, head: Manifest) -> None:
        """Save the stream position of ``head`` in the tracker's state.

        Saves None instead if the next version must be a snapshot.
        """
        place = Position(head.stream, head.link).to_dict() if self._has_snapshot else None
        self.handle.annotate(place)

    def _prepare(self) -> None:
        """Wait for updates in progress, and find states that were written in place since the last cut.

        Raises:
            UpdateInProgressError: if an update is still in progress after the wait.
            MissingStepError: if rows were updated since the last step of the tracker.
            InvalidArgumentError: if the data position does not follow training.
        """
        tracker = self._tracker
        seconds = _AGAIN_SECONDS if self._waited_in_vain else _UPDATE_SECONDS
        self._waited_in_vain = True
        self.handle.wait_for_updates(seconds)
        self._waited_in_vain = False
        num_batches, num_before = self._start
        if tracker.num_unstepped > (num_before if tracker.num_batches == num_batches else 0):
            raise MissingStepError(tracker.num_batches)
        if tracker.data_position is not None:
            tracker.data_position.check()
        assert self._watch is not None, "there are states"
        for fqn in self._watch.written():
            shard = tracker.shards[fqn]
            every = torch.arange(shard.num_rows, device=tracker.state_views(fqn)[0][0].device)
            for handle in (self.handle, self._meanwhile):
                if handle is not None:
                    handle.distrust(fqn, every)

    def _consumers(self) -> dict[str, ConsumerState]:
        """Return the pending rows of the other consumers, relative to the versions of this publisher.

        The position of a consumer's own stream is of the same time.
        """
        others = self.handle.others()
        oldest = min((position for position, _ in others.values()), default=self.handle.position)
        del self._cuts[: self._num_cuts(oldest) - 1 if self._num_cuts(oldest) else 0]
        found = {}
        for name, (position, carried) in others.items():
            number = self._num_cuts(position)
            left_out = {fqn: ids + self._tracker.shards[fqn].row_offset for fqn, ids in carried.items()}
            note = self.handle.note_of(name)
            place = note if isinstance(note, Mapping) else None
            found[name] = ConsumerState(self._cuts[number - 1][1] if number else None, left_out, place)
        return found

    def _num_cuts(self, position: int) -> int:
        """Return the number of known cuts up to a position of the log."""
        return bisect_right(self._cuts, position, key=lambda cut: cut[0])

    def _owners(self) -> Mapping[str, Tensor]:
        """Return the raw ids that own the rows of each table with managed collisions at the last cut, by FQN."""
        return self._tracker.owner_views()

    def _attach(self) -> None:
        """Find what depends on the tracker's shards."""
        tracker = self._tracker
        states: Mapping[str, TableStates] = {}
        if self._has_states:
            states = dict(tracker.table_states)
            self._collisions = tracker.collision_modules
        chosen = self._encoding
        if isinstance(chosen, Mapping):  # a table may have left the model since the constructor has checked them
            chosen = {fqn: each for fqn, each in chosen.items() if fqn in tracker.tables}
        self._gatherer.encodings = choose_encodings(chosen, tracker)
        self._schema = states, dict(tracker.identities), dict(tracker.tables)
        has_others = self._dense_choice is not None or self._has_states or bool(tracker.identities)
        self._is_compared = has_others or len(tracker.fused_tables) < len(tracker.tables)
        self._num_attached = tracker.num_attached

    def _training_source(self, training: Training) -> TrainingSource:
        """Return the source of the training state.

        Raises:
            InvalidArgumentError: if an object has no state that can be published.
            UnsupportedTableError: if an unfused table has no optimizer among the objects.
        """
        tracker = self._tracker

        def collisions() -> Mapping[str, nn.Module]:
            if self._num_attached != tracker.num_attached:
                self._attach()
            return self._collisions

        return TrainingSource(
            tracker,
            training.shared,
            training.per_rank,
            dense=lambda: dense_tensors(tracker.model, tracker.model, tables=tracker.tables),
            unfused=tracker.unfused_storages(),
            collisions=collisions,
            is_first=self._is_first,
            publisher=self.handle.name,
        )

    def _dense(self) -> dict[str, Tensor]:
        """Return the model's dense tensors that this rank writes, by name; empty on ranks other than 0.

        Raises:
            InvalidArgumentError: if the model has no dense tensor with a given name, or if a tensor has an unsupported
                dtype or number of dimensions.
        """
        if self._dense_choice is None or not self._is_first:
            return {}
        found = dense_tensors(self._tracker.model, self._dense_choice, tables=self._tracker.tables)
        for name, tensor in found.items():
            if tensor.dtype not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
                remedy = f"Leave it out: streams do not support {tensor.dim()}-d {tensor.dtype}"
                raise InvalidArgumentError("dense", name, remedy)
        return found


class _UnreadError(Exception):
    """This rank failed or was interrupted before it read its rows."""


def _count_owner_changes(read: Delta, identities: Iterable[str]) -> dict[str, Tensor]:
    """Return the numbers of raw ids that got and lost rows, ``[2]`` int64, by FQN. Does not wait for a device."""
    found = {}
    for fqn in identities:
        rows = read[fqn]
        if rows.admitted is not None and rows.evicted is not None and len(rows):
            found[fqn] = torch.stack([(each != NO_OWNER).sum() for each in (rows.admitted, rows.evicted)])
    return found


def _check_recoverable(tracker: ModelDeltaTracker, encodings: Mapping[str, Encoding], top_k: TopK | None) -> None:
    """Check that the versions of a publisher can have the complete training state.

    Raises:
        InvalidArgumentError: if rows are encoded, or left out by ``top_k``.
        UnsupportedModuleError, UnsupportedOptimizerError, UnsupportedTableError: if a table's state is not supported.
    """
    if top_k is not None:
        raise InvalidArgumentError("top_k", top_k, "Pass None: a version with states has all changed rows")
    for fqn, table in tracker.tables.items():
        if encodings[fqn] is not Encoding.of(table.dtype):
            remedy = f"Leave {fqn!r} out: a version with states has the rows in the table's dtype"
            raise InvalidArgumentError("encoding", str(encodings[fqn]), remedy)
    tracker.check_recoverable()
