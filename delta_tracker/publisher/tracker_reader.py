"""Read the rows and dense tensors of a version from the tracker, then commit or abort the read."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, RankLostError, StaleDeltaError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.exchange import Exchange, Message, Phase
from delta_tracker.publisher.host_copies import SelectedRows
from delta_tracker.publisher.rank_tables import EncodingChoice, RankSchema, RankTables, choose_encodings
from delta_tracker.publisher.repair import rows_to_repair, warn_of_changes
from delta_tracker.publisher.training import Recovery, TrainingCuts, check_recoverable
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sharding.dense import DenseChoice, dense_parameters, dense_tensors
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import DTYPE_NAMES, MAX_DIMS, Kind, Manifest, Part, Schema
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Position
from delta_tracker.tracker.checkpoint.tracker_checkpoint import LoadOutcome
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.tracker.top_k import AllRanks, TopK, choose
from delta_tracker.tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, dtype_name

_logger = logging.getLogger(__name__)
_MAX_NAMES = 5


class TrackerReader:
    """Reader of rows for versions. It reserves a consumer of the tracker, and reads the changed rows of this consumer.

    Only the training thread may call the methods. For the arguments not listed here and the errors, see ``Publisher``.

    Args:
        exchange: communication with the other ranks.
        recovery: training state to publish with each version; None to publish versions without states.

    Attributes:
        tables: tables of this rank, which provide the schema and copies of rows.
        find_dense: function that returns the dense tensors that this rank writes, by name; None if there are none.
        is_repairing: True if the next delta must contain all pending rows despite ``top_k``, because it repairs
            versions that were published after the loaded checkpoint.
    """

    def __init__(
        self,
        tracker: ModelDeltaTracker,
        consumer: str | None,
        *,
        top_k: TopK | None,
        dense: DenseChoice | bool | None,
        encoding: EncodingChoice,
        exchange: Exchange,
        recorder: Recorder,
        recovery: Recovery | None = None,
    ) -> None:
        is_first, live = exchange.rank == 0, tracker.live
        encodings = choose_encodings(encoding, live)
        if recovery is not None:
            check_recoverable(live, encodings, top_k)
        self.tracker = tracker
        self._top_k = top_k
        self._ranks = AllRanks(exchange.group)
        self.tables = RankTables(live, encoding, writes_replicas=is_first, with_states=recovery is not None)
        self.find_dense: Callable[[], Mapping[str, Tensor]] | None = None
        if dense is None and is_first:
            warn_of_dense(live)
        elif dense is not None and dense is not False:
            self.find_dense = partial(published_dense, live, chosen_dense(dense, live)) if is_first else dict
            self.find_dense()
        self.handle = tracker.reserve(consumer, holder="Publisher")
        try:
            self.handle.check_top_k(top_k)
            self._training: TrainingCuts | None = None
            if recovery is not None:
                self._training = TrainingCuts(live, tracker.progress, self.handle, recovery, is_first=is_first)
        except BaseException:
            self.handle.release()
            raise
        self._read_timer = recorder.read_seconds.timer(consumer=self.handle.name)
        self._encode_timer = recorder.encode_seconds.timer()
        self._meanwhile: ConsumerHandle | None = None  # second consumer, for changes while a snapshot is copied
        self._has_snapshot = self.is_repairing = False
        self._progress_at_cut: tuple[int, int] | None = None  # of the last version

    @property
    def needs_snapshot(self) -> bool:
        """True if the next version must be a snapshot. Call :meth:`batch_and_schema` first to detect changed tables."""
        return not self._has_snapshot or self.handle.needs_snapshot or self.tables.latest != self.tables.published

    @property
    def has_changes(self) -> bool:
        """True if a snapshot is needed, if rows are pending, or if :meth:`cut` may find changes that were not recorded.

        Waits for the device.
        """
        if self.needs_snapshot or any(self.tracker.num_pending(self.handle.name).values()):
            return True
        return self._progress() != self._progress_at_cut

    def batch_and_schema(self) -> tuple[int, RankSchema]:
        """Return the number of batches that this rank has trained on, and the schema of this rank's tables."""
        return self.tracker.num_batches, self.tables.current()

    def resume(self, exchange: Exchange, writer: Coordinator) -> None:
        """Make rows pending that were published after the loaded checkpoint, so that the next version repairs them.

        A collective. The next version must be a snapshot instead if a rank has not loaded a checkpoint or cannot find
        these rows, or if versions contain states and the model was not restored from a stream. Rank 0 logs differences
        between the model and the stream. Raises the same errors as :meth:`Coordinator.check_same_store`.
        """
        tracker = self.tracker
        rows: dict[str, Tensor] | None = None

        def find() -> dict[str, Any]:
            nonlocal rows
            writer.check_same_store()
            # If rows were read from the consumer since the load, no version contains them: the position is invalid.
            note = self.handle.note if self.handle.is_as_restored else None
            if self._training is not None and tracker.restored is not LoadOutcome.STREAM:
                note = None  # a checkpoint may have been loaded without the optimizer's states
            if note is not None:
                own = self.tables.current()
                schema: Schema = own.format, own.tables, writer.states, own.identities
                rows = rows_to_repair(StreamLog(writer.storage), note, writer.head, schema, tracker.shards)
            return {"knows": rows is not None}

        if all(vote["knows"] for vote in exchange.exchange(Phase.RESUMING, Message.of(find))) and rows is not None:
            for fqn, ids in rows.items():
                self.handle.make_pending(fqn, ids)
            self._has_snapshot = self.is_repairing = True
            if self._training is not None and isinstance(self.handle.note, Mapping):
                self._training.add(self.handle.position, Position.from_dict(self.handle.note).version)
        if writer.is_first:
            dense = None if self.find_dense is None else self.find_dense()
            warn_of_changes(StreamLog(writer.storage), writer.head, self.tables.current(), dense)
        self._note(writer.head)

    def copy(self) -> list[BlockRows]:
        """Start a snapshot. Return all rows of the tables with a fused optimizer.

        Later changes are tracked and read by :meth:`cut`. The rows are copied in chunks when they are read.
        """
        if self.handle.needs_snapshot:
            # The pending rows were dropped: until this snapshot is committed, a resumed trainer needs a snapshot too.
            self._has_snapshot = False
            self.handle.annotate(None)
            self.handle.clear()
        if self._meanwhile is not None:  # left by an interrupted call
            self._meanwhile.release()
        self._meanwhile = self.handle.begin_copy()
        self.tables.copying = self.tables.current()
        with one_cut():
            return self.tables.whole(self.tracker.live.fused_tables, self.tracker.live.owner_views())

    def cut(self, kind: Kind, copied: Part | None, *, is_complete: bool = False) -> tuple[Draft, Delta]:
        """Read the rows of a version, and start copying their current values.

        With ``top_k``, reading a delta is a collective. A rank that fails before the read must call
        :meth:`fail_expected_read`.

        Args:
            kind: ``"snapshot"`` or ``"delta"``.
            copied: for a snapshot, the part that contains the rows returned by :meth:`copy`; None if there are no rows.
            is_complete: for a delta, True to read all changed rows despite ``top_k``. All ranks must pass the same
                value.

        Returns:
            This rank's data for the version, and the read to pass to :meth:`end`.

        Raises:
            InvalidArgumentError: if the tables were resharded while the version was copied.
        """
        tracker, tables, training = self.tracker, self.tables, self._training
        schema, is_snapshot = tables.current(), kind == "snapshot"
        self._progress_at_cut = self._progress()
        if schema != (tables.copying if is_snapshot else tables.published):
            raise InvalidArgumentError("tracker", "resharded", "Publish again: the next version is a snapshot")
        if training is not None:
            training.begin(self._meanwhile)
        # Otherwise the stream has other raw ids than those of the consumer's last read.
        counts_owners = self._has_snapshot and not self.is_repairing and schema == tables.published
        counted = schema.identities if counts_owners else ()
        with one_cut():
            dense = {} if self.find_dense is None else self.find_dense()
            # First, because it calls the user's code, which may raise.
            taken = None if training is None else training.take(dense)
            extra = [] if taken is None else [*taken.selections]
            top_k = None if is_snapshot or is_complete else self._top_k
            with self._read_timer():
                # Not committed, because an interrupted cut is repeated and must find the same rows.
                changed = read = self.handle.read(commit=False, with_states=False, top_k=top_k, ranks=self._ranks)
                if is_snapshot:
                    # The rows that changed during the copy. Tables without a fused optimizer are copied whole only now:
                    # their changes are found by comparison, which misses a value that changed and then changed back.
                    assert self._meanwhile is not None, "copy() came first"
                    changed = self._meanwhile.read(commit=False, with_states=False)
            with self._encode_timer():
                counts = _count_owner_changes(read, counted) if counted else {}
                extra += counts.values()
                owners = tracker.live.owner_views() if schema.identities else {}
                compared = tables.unfused if is_snapshot else frozenset[str]()
                rows = tables.copy_rows(changed, whole=compared, dense=dense, extra=extra, owners=owners)
        draft = Draft(
            kind=kind,
            batches=read.batches,
            cut=time.time(),
            schema=schema,
            copied=rows,
            pending_rows=read.pending_rows,
            parts=[] if copied is None else [copied],
            training=taken,
            owner_changes=counts if counted else None,
        )
        return draft, read

    def expect_read(self, *, is_complete: bool) -> None:
        """Record that all ranks start a delta. With ``top_k``, the other ranks then wait for this rank's read."""
        self._ranks.is_expected = self._top_k is not None and not is_complete

    def can_read(self, kind: Kind, *, is_complete: bool) -> bool:
        """Return False if :meth:`cut` would repeat a collective in which this rank has already taken part."""
        return kind == "snapshot" or is_complete or self._top_k is None or self._ranks.is_expected

    def fail_expected_read(self) -> None:
        """Make the read with ``top_k`` fail on all ranks, if the other ranks wait for this rank to read its rows.

        If this rank fails before it reads its rows, call this method before any other collective.
        """
        if self._ranks.is_expected and self._top_k is not None:
            with suppress(_UnreadError, RankLostError):  # a lost rank is reported by the next collective
                choose(self._top_k, _UnreadError(), list(self.tracker.shards), self._ranks)

    def end(self, read: Delta | None, committed: Manifest | None) -> None:
        """Commit ``read``, a result of :meth:`cut`. If ``committed`` is None, abort the read: its rows stay pending."""
        if committed is None:
            self._progress_at_cut = None
        else:  # first, so that the flags are equal on all ranks even if the code below fails
            self._has_snapshot, self.is_repairing = True, False
            if committed.kind == "snapshot":
                self.tables.published = self.tables.copying
            if read is not None and self._training is not None:
                self._training.add(read.stop, committed.version)
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

    def close(self, *, removes_position: bool) -> None:
        """Release the consumer.

        If ``removes_position`` is True, the consumer's stream position is removed from the tracker's state. Pass True
        to close a publisher, and False if the publisher could not be created.
        """
        if removes_position and not self.handle.is_released:  # an earlier call may have been interrupted
            self.handle.annotate(None)
        if self._meanwhile is not None:  # left by an interrupted call
            self._meanwhile.release()
        self.handle.release()

    def _progress(self) -> tuple[int, int] | None:
        """Return the batch count and the update count since the last batch; None if all changes are pending rows."""
        tables = self.tables
        if self.find_dense is not None or self._training is not None or tables.unfused or tables.latest.identities:
            return self.tracker.num_batches, self.tracker.progress.num_unstepped
        return None

    def _note(self, head: Manifest) -> None:
        """Save the stream position of ``head`` in the tracker's state, or None if a snapshot must follow."""
        self.handle.annotate(Position.after(head).to_dict() if self._has_snapshot else None)


class _UnreadError(Exception):
    """Error of a rank that failed, or was interrupted, before it read its rows."""


def _count_owner_changes(read: Delta, identities: Iterable[str]) -> dict[str, SelectedRows]:
    """Return, by FQN, how many raw ids gained and how many lost a row, ``[2]`` int64. Does not wait for a device."""
    found = {}
    for fqn in identities:
        rows = read[fqn]
        if rows.admitted is not None and rows.evicted is not None and len(rows):
            found[fqn] = SelectedRows(torch.stack([(each != NO_OWNER).sum() for each in (rows.admitted, rows.evicted)]))
    return found


def chosen_dense(dense: DenseChoice | Literal[True], live: LiveTables) -> DenseChoice:
    """Return ``dense`` in a form that can be iterated repeatedly. If ``dense`` is True, return the model."""
    if dense is True:
        return live.model
    if isinstance(dense, Mapping):
        return dict(dense)
    return dense if isinstance(dense, nn.Module | str) else tuple(dense)


def warn_of_dense(live: LiveTables) -> None:
    """Log a warning if the model has trainable dense parameters. Call this function if none are published."""
    if names := dense_parameters(live.model, live.tables):
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else "")
        _logger.warning(
            "these parameters of the model are not published, so that predictors keep their own values: %s. Pass "
            "dense=True to publish all dense parameters, or dense=False if they are sent in another way",
            shown,
        )


def published_dense(live: LiveTables, choice: DenseChoice) -> dict[str, Tensor]:
    """Return the chosen dense tensors by name, without copying them.

    Raises InvalidArgumentError if a tensor is not in the model, or if its dtype or number of dimensions is unsupported.
    """
    found = dense_tensors(live.model, choice, tables=live.tables)
    for name, tensor in found.items():
        if dtype_name(tensor.dtype) not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
            remedy = f"Leave it out: streams do not support {tensor.dim()}-d {tensor.dtype}"
            raise InvalidArgumentError("dense", name, remedy)
    return found
