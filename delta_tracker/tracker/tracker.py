"""Public interface of the tracker: :class:`ModelDeltaTracker`."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, get_args

from torch import Tensor, nn

from delta_tracker.arguments import check_switch
from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.live_objects import Uncopied, announce_training
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.rows import to_device
from delta_tracker.sharding.collisions import LocalOwners, local_owners
from delta_tracker.sharding.kernel_hooks import KeyedIds
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.pairs import check_pair
from delta_tracker.sharding.torchrec_api import load_torchrec
from delta_tracker.sharding.weights import read_rows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.collectives import Strategy
from delta_tracker.tracker.checkpoint.tracker_checkpoint import LoadOutcome, TrackerCheckpoint
from delta_tracker.tracker.consumer_handle import ConsumerHandle, TrackerParts
from delta_tracker.tracker.data_position import DataPosition
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.hooks import BatchProgress, TrackerHooks
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.tracker.log_writes import mark_lookup
from delta_tracker.tracker.modes import CAPTURES, UPDATE_MODE_MAP
from delta_tracker.tracker.stats import TrackerGauges, TrackerStats
from delta_tracker.tracker.store.owner_store import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.store.shadow import make_store
from delta_tracker.tracker.top_k import TopK
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta, Memory, ShardSpec, TableSpec, TrackingMode

__all__ = ["UPDATE_MODE_MAP", "ModelDeltaTracker", "Record"]

_logger = logging.getLogger(__name__)

# Here and not in the constructor, because the user's own import of torchrec comes before that and names no remedy.
check_pair()

Record = Literal["updates", "lookups"]

_OPTIONS = "some of commit, with_states, with_values, with_optimizer and top_k"  # of get_delta()
_OF_TORCHREC = {
    "top_percentage": "top_k=TopK(fraction=..., per_table=True)",
    "per_table_percentage": "top_k=TopK(fraction=..., per_table=True)",
    "sorted_by_indices": "no order: ids are always ascending",
}
_METHODS_OF_TORCHREC = {"get_unique", "get_unique_ids"}


def __getattr__(name: str) -> object:
    """Return ``SUPPORTED_MODULES``: the TorchRec module classes that can be tracked. Accessing it imports TorchRec."""
    if name == "SUPPORTED_MODULES":
        return tuple(load_torchrec().collections)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ModelDeltaTracker(Uncopied, remedy="Save or copy its state_dict()"):
    """Tracker that records which rows of a model's embedding tables change, for any number of consumers.

    On each rank, create a tracker after the model is sharded, call :meth:`step` after each batch, and call
    :meth:`get_delta` at any time. Each rank tracks its own shards. The only collectives are reads with ``top_k``, and
    ``state_dict`` with a strategy that gathers.

    A row counts as changed when an update to the row is written, not when the row is looked up. With managed
    collisions, a row also counts as changed when its raw id changes. No update is lost if a read takes place between
    two operations of the training thread. Call :meth:`mark_changed` after writes that cannot be detected.
    ``guide/train.md`` describes how each kind of table is tracked, and which operations mark all rows. Copies of the
    model are not tracked. :class:`~delta_tracker.errors.UntrackedTrainingWarning` is issued if only a copy is trained.

    Args:
        model: a ``DistributedModelParallel`` or ``DMPCollection``, any module that contains sharded
            EmbeddingCollections or EmbeddingBagCollections, or a model with ``nn.Embedding`` or ``nn.EmbeddingBag``
            modules.
        consumers: names of the independent readers. Default: one consumer named ``"default"``.
        delete_on_read: True to drop rows that every consumer has committed. False to keep these rows for
            :meth:`rewind`. They take at most one more row set per table, and old states if the mode keeps them.
        auto_compact: True to compact the log when an output distribution has been launched, so that compaction
            overlaps with communication. False to compact after each read. Trackers that keep old states on a GPU always
            compact after reads.
        mode: tracking mode or its name. The mode selects the data to keep for each changed row.
        fqns_to_skip: tables not to track. Pass table FQNs, FQNs of parent modules, or single components of FQNs.
        record: ``"updates"`` to record rows whose update is written, or ``"lookups"`` to also record all rows that are
            looked up, as TorchRec's tracker does. Plain modules support ``"updates"`` only.
        max_bytes: maximum size of the log on this rank in bytes, including rows that top-k left out. If the log is
            larger, the consumer that lags furthest behind is dropped, and its next read raises
            :class:`~delta_tracker.errors.NeedsSnapshotError`. None for no limit. The size includes old states in pinned
            host memory: a CUDA device keeps only the newest old states, about 64 MiB per table.
        engine: name of the row set implementation, see
            :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`. If this engine fails later, the torch engine
            is used instead.
        monitor: monitor that records this tracker's metrics; None for ``delta_tracker.monitor.MONITOR``.
        name: value of the metrics' label ``tracker``. Default: ``"tracker"``. If another tracker of this process
            already has this name, a number is appended, as in ``"tracker-2"``.

    Raises:
        UnsupportedModelError: if the model has no table to track, if a sharded or managed-collision module, a kernel, a
            fused optimizer or a plain weight is unsupported, or if the mode does not support an optimizer.
        InvalidArgumentError: if consumer names are missing or repeated, or if another argument is invalid.
        MissingExtraError: if the package of the chosen engine is not installed.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
        >>> tracker = ModelDeltaTracker(model)
        >>> model(torch.tensor([[7, 42, 7]])).sum().backward()
        >>> torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> tracker.get_delta_ids()["0"].tolist()
        [7, 42]
    """

    DEFAULT_CONSUMER = "default"

    def __init__(  # noqa: PLR0913  the arguments of TorchRec's tracker, and five more
        self,
        model: nn.Module,
        consumers: Sequence[str] | None = None,
        delete_on_read: bool = True,  # noqa: FBT001, FBT002  positional as in TorchRec's tracker
        auto_compact: bool = False,  # noqa: FBT001, FBT002
        mode: TrackingMode | str = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
        *,
        record: Record = "updates",
        max_bytes: int | None = None,
        engine: str | None = None,
        monitor: Monitor | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError("model", model, "Pass a torch.nn.Module, such as a DistributedModelParallel")
        check_switch("delete_on_read", delete_on_read)
        check_switch("auto_compact", auto_compact)
        mode = TrackingMode.of(mode)
        if record not in get_args(Record):
            raise InvalidArgumentError("record", record, f"Pass one of {get_args(Record)}")
        self._mode = mode
        self._records_lookups = record == "lookups"
        self._engine = engine
        self._capture = capture = CAPTURES[mode]
        self._model = TrackedModel(model, fqns_to_skip, self._capture)
        if self._records_lookups and not self._model.found.modules:
            raise InvalidArgumentError("record", record, "Pass 'updates': lookups of plain modules are not recorded")
        owners = local_owners(model, self._model.found)
        self._metrics = Recorder("tracker", self, name=name, monitor=monitor)
        self._gauges = TrackerGauges(self._metrics, mode)
        self._log = ChangeLog(
            self._make_stores(self._model.shards),
            [self.DEFAULT_CONSUMER] if consumers is None else consumers,
            delete_on_read=delete_on_read,
            auto_compact=auto_compact,
            max_bytes=max_bytes,
            received=self._gauges.received,
            owners=self._make_owners(owners),
        )
        self._live = LiveTables(self._model, self._log)
        announce_training(self._live)
        self._reader = DeltaReader(self._log, self._model, self._capture)
        self._checkpoint = TrackerCheckpoint(self._log, self._model, mode, self._metrics.monitor)
        self._hooks = TrackerHooks(
            self._log.writes, self._model, self._metrics, lookups=self._records_lookups, keeps_states=capture.keeps_old
        )
        self._progress = BatchProgress(self._log, self._hooks)
        self._hooks.attach()
        for fqn, table in self._model.found.tables.items():
            features = self._model.found.features.get(fqn, [])
            _logger.info("tracking table: fqn=%s shape=%s mode=%s features=%s", fqn, table, mode.value, features)
        for fqn, store in self._log.segments.owners.items():
            if store.source.falls_back:
                _logger.warning("table %r maps unknown raw ids to rows of others; a stream maps them to no row", fqn)
        self._metrics.watch(ModelDeltaTracker._show_gauges)

    if not TYPE_CHECKING:  # a type checker would otherwise allow any name

        def __getattr__(self, name: str) -> Never:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _METHODS_OF_TORCHREC:
                text += ". Call get_delta(), or import ModelDeltaTracker from delta_tracker.compat"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return (
            f"ModelDeltaTracker(tables={len(self.tables)}, consumers={list(self.consumers)}, mode={self._mode.name}, "
            f"batches={self.num_batches})"
        )

    # Tracked tables

    @property
    def model(self) -> nn.Module:
        """The tracked model."""
        return self._model.module

    @property
    def mode(self) -> TrackingMode:
        """Tracking mode, which selects the data to keep for each changed row."""
        return self._mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Spec of each table, by FQN. Equal on all ranks."""
        return self._live.tables

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """Spec of this rank's shard of each table, by table FQN. The shard is empty on a rank without rows."""
        return self._live.shards

    @property
    def live(self) -> LiveTables:
        """Read access to this rank's rows, optimizer states and raw ids, for components that copy whole tables."""
        return self._live

    @property
    def num_hook_errors(self) -> int:
        """Number of errors caught in hooks. After an error, the next read returns all rows of the hook's tables."""
        return self._hooks.num_errors

    @property
    def tracked_modules(self) -> Mapping[str, nn.Module]:
        """Sharded embedding modules that are tracked, by FQN. Read-only."""
        return MappingProxyType(self._model.found.modules)

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """Return a copy of :attr:`tracked_modules`."""
        return dict(self._model.found.modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Return the names of the features of each table, by table FQN."""
        return {fqn: list(names) for fqn, names in self._model.found.features.items()}

    @property
    def feature_to_fqn(self) -> dict[str, str]:
        """FQN of the first table in which each feature is looked up, by feature name."""
        found: dict[str, str] = {}
        for fqn, names in self._model.found.features.items():
            for name in names:
                found.setdefault(name, fqn)
        return found

    @property
    def store(self) -> Mapping[str, SegmentStore]:
        """Stores of changed rows, by table FQN. Do not modify the stores. Read them only between batches."""
        return MappingProxyType(self._log.segments.stores)

    # Training

    @property
    def progress(self) -> BatchProgress:
        """Progress of training: counts of batches, updates and recorded rows, and the position in the training data."""
        return self._progress

    @property
    def num_batches(self) -> int:
        """Number of :meth:`step` calls."""
        return self._log.cursors.num_batches

    @property
    def curr_batch_idx(self) -> int:
        """Index of the current batch, equal to :attr:`num_batches`."""
        return self._log.cursors.num_batches

    @property
    def curr_compact_index(self) -> int:
        """Value of :attr:`curr_batch_idx` at the last compaction; 0 before the first compaction."""
        return self._log.segments.num_compacted

    @property
    def per_consumer_batch_idx(self) -> dict[str, int]:
        """Value of :attr:`curr_batch_idx` at each consumer's last committed read, by consumer name.

        The ``batches`` of the consumer's next delta start at this value. Before the first committed read, this is the
        value when the consumer was added.
        """
        return {name: each.batch for name, each in self._log.cursors.consumers.copy().items()}

    def step(self) -> None:
        """Count one batch, enforce ``max_bytes``, and advance the position that :meth:`attach_data` attached.

        Updates are tracked even if this method is never called.
        """
        self._progress.step()

    def attach_data(self, position: DataPosition[Any]) -> None:
        """Attach a position in the training data. :meth:`step` then advances it, and publishers save it in versions.

        Args:
            position: the position. It must not belong to another tracker. Attaching it again does nothing.

        Raises:
            InvalidArgumentError: if ``position`` is not a DataPosition, if another position is attached, or if batches
                were already fetched but have not been trained on.
        """
        self._progress.attach_data(position)

    def mark_changed(self, fqn: str, ids: Tensor | None = None) -> None:
        """Mark rows as changed. Their old states become unknown.

        Call it only after writes that cannot be detected: collectives that write to the weights, and writes through
        ``.data``, ``untyped_storage()``, DLPack, numpy or raw pointers.

        Args:
            fqn: FQN of the table.
            ids: ``[N]`` integer local ids, in any order. None for all rows.

        Raises:
            InvalidArgumentError: if the table is not tracked or an id is outside the shard. No row is then marked.
        """
        shard = self._model.shard(fqn)
        if ids is not None:
            shard.spec.check_ids(ids)
            ids = to_device(ids, shard.device)
        self._log.writes.mark(fqn, ids, is_written=True)

    def record_ids(self, kjt: KeyedIds) -> None:
        """Mark the rows of a lookup as changed. Hooks do this for lookups of tracked modules.

        Args:
            kjt: KeyedJaggedTensor of local ids. The ids of a feature are marked in every table that has the feature.

        Raises:
            InvalidArgumentError: if no feature belongs to a tracked table, or an id on the CPU is outside its table.
        """
        mark_lookup(self._log.writes, self._model.found, kjt)

    def record_embeddings(self, kjt: KeyedIds, embeddings: Tensor) -> None:
        """Mark the rows of a lookup as changed, and save their old values.

        Args:
            kjt: KeyedJaggedTensor of local ids.
            embeddings: values of the rows before the change, in the order of ``kjt.values()``, in any shape with one
                row for each id.

        Raises:
            InvalidArgumentError: if the mode is not EMBEDDING, or the number or width of the rows is wrong.
        """
        if self._mode is not TrackingMode.EMBEDDING:
            raise InvalidArgumentError("mode", self._mode, "Track in EMBEDDING mode to record embeddings")
        mark_lookup(self._log.writes, self._model.found, kjt, embeddings)

    def record_lookup(self, kjt: KeyedIds, states: Tensor) -> None:
        """Mark the rows of a lookup as changed. In EMBEDDING mode, also save ``states`` as their old values."""
        if self._mode is TrackingMode.EMBEDDING:
            self.record_embeddings(kjt, states)
        else:
            self.record_ids(kjt)

    # Consumers

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return self._log.consumers.names

    def add_consumer(self, consumer: str) -> None:
        """Add a consumer. Its first read returns the rows that change after this call.

        Raises InvalidArgumentError if a consumer of this name exists, or if the name is not a string.
        """
        self._log.consumers.add(consumer)

    def remove_consumer(self, consumer: str) -> None:
        """Remove a consumer. Drops rows that no other consumer needs if ``delete_on_read`` is True.

        Raises InvalidArgumentError for an unknown consumer, and ReservedConsumerError for a reserved consumer.
        """
        self._log.consumers.remove(self._log.consumers.resolve(consumer))

    def reserve(self, consumer: str | None = None, *, holder: str = "a ConsumerHandle") -> ConsumerHandle:
        """Reserve a consumer, and return a handle with exclusive access to it.

        Until the handle is released, the tracker's methods that read, clear, rewind or remove the consumer raise
        :class:`~delta_tracker.errors.ReservedConsumerError`, whose message contains ``holder``. The name is optional if
        there is only one consumer. Raises ReservedConsumerError if the consumer is already reserved, and DetachedError
        after :meth:`detach`.
        """
        self._model.check_attached()
        name = self._log.consumers.reserve(consumer, holder)
        try:
            parts = TrackerParts(self._log, self._model, self._reader, self._hooks, self)
            return ConsumerHandle(name, holder, parts)
        except BaseException:
            self._log.consumers.release(name)
            raise

    def needs_snapshot(self, consumer: str | None = None) -> bool:
        """Return True if a consumer needs all rows because it was dropped when the log exceeded ``max_bytes``.

        The name is optional if there is only one consumer. Raises InvalidArgumentError for an unknown consumer.
        """
        return self._log.consumers.find(consumer).was_dropped

    def clear(self, consumer: str | None = None) -> None:
        """Discard the pending rows of a consumer, or of all consumers if no name is given.

        To recover a dropped consumer, call this method, then send all rows (see :meth:`read_rows`) to the consumer. If
        the call is interrupted, all rows may become pending. Raises InvalidArgumentError for an unknown consumer, and
        ReservedConsumerError for a reserved consumer.
        """
        with self._log.lock:
            names = self._log.consumers.names if consumer is None else [consumer]
            self._log.consumers.clear(*[self._log.consumers.resolve(each) for each in names])  # all or none

    def rewind(self, consumer: str | None = None) -> None:
        """Move a consumer to the start of the log. Rows changed since the tracker was created become pending again.

        Aborts the consumer's uncommitted read. The name is optional if there is only one consumer. Raises
        InvalidArgumentError for an unknown consumer or if ``delete_on_read`` is True, and ReservedConsumerError for a
        reserved consumer.
        """
        self._log.consumers.rewind(self._log.consumers.resolve(consumer))

    # Memory

    def memory(self) -> Memory:
        """Return the memory usage of the tracker on this rank."""
        with self._log.lock:
            return self._log.segments.memory()

    def stats(self) -> TrackerStats:
        """Return the lag and number of pending rows of each consumer, and the memory usage, on this rank.

        Waits for the device. :meth:`num_pending` describes which rows count. All rows of a dropped consumer count.
        """
        log = self._log
        with log.lock:
            log.segments.fence.enter()
            log.segments.notice_writes(log.segments.stores)
            return TrackerStats.of(log, self._mode, counts=True)

    def num_pending(self, consumer: str | None = None) -> dict[str, int]:
        """Return the number of pending rows of a consumer on this rank, by table FQN. Waits for the device.

        Does not move the cursor. The consumer may be reserved. The name is optional if there is only one consumer.
        Changes of tables without a fused optimizer are counted only after the next read. Changes of raw ids are counted
        only after the next read or checkpoint. Raises InvalidArgumentError for an unknown consumer.
        """
        return self._log.consumers.num_pending(consumer)

    def compact(self, start_idx: int = 0, end_idx: int | None = None) -> None:
        """Merge segments of the log, and drop rows that every consumer has committed, to free memory.

        Rows are dropped only if ``delete_on_read`` is True. Compaction does not change the results of reads. The call
        does nothing if the range of batches ends at or before the last compaction. Otherwise it compacts the whole log.

        Args:
            start_idx: first batch of the range.
            end_idx: end of the range, exclusive, at most ``curr_batch_idx + 1``. None always compacts the whole log.

        Raises:
            InvalidArgumentError: if the range is empty, starts before 0 or ends after the current batch, or if a bound
                is not an integer.
        """
        last = self._log.cursors.num_batches + 1
        end = last if end_idx is None else end_idx
        if type(start_idx) is not int or type(end) is not int or not 0 <= start_idx < end <= last:
            remedy = f"Pass integers with 0 <= start_idx < end_idx <= {last}"
            raise InvalidArgumentError("start_idx, end_idx", (start_idx, end_idx), remedy)
        if end_idx is None or end > self._log.segments.num_compacted:
            self._log.compact()

    def trigger_compaction(self) -> None:
        """Compact the whole log. Equivalent to :meth:`compact` without arguments."""
        self.compact()

    # Reading

    def get_delta(
        self,
        consumer: str | None = None,
        *,
        commit: bool = True,
        with_states: bool = True,
        with_values: bool = False,
        with_optimizer: bool = False,
        top_k: TopK | None = None,
        **unknown: Never,
    ) -> Delta:
        """Return the rows that changed since the consumer's last committed read.

        If the call raises an error, an earlier uncommitted read can still be committed. If the call is interrupted, the
        earlier read may be aborted; its rows stay pending. If the model has managed collisions, call this method in the
        training thread: TorchRec does not update raw ids atomically.

        Args:
            consumer: name of the consumer; optional if there is only one consumer.
            commit: True to commit the read. If False, the rows stay pending until :meth:`commit` is called. A new read
                replaces the uncommitted read and includes its rows.
            with_states: True to add ``states``, if the mode has them. False is faster and blocks hooks for less time.
            with_values: True to add ``values``: the current rows, ``[N, D]`` in the table's dtype.
            with_optimizer: True to add ``optimizer``: the current states of the fused optimizer for these rows.
            top_k: limit of the delta's size. Only the rows with the highest scores are returned, and the other rows
                stay pending. A call with ``top_k`` is a collective. Rows of a DATA_PARALLEL table are selected on rank
                0, and rows of a table in 2D parallelism on the first replica. Deltas of other ranks and replicas
                contain all changed rows of these tables.
            unknown: not accepted. For arguments of TorchRec's tracker, the error message names the replacement.

        Returns:
            :class:`~delta_tracker.types.Delta`, a mapping from table FQN to rows. A table without changes has empty
            rows. Rows whose update is in progress are included both in this delta and in the next delta. The caller
            owns the tensors.

        Raises:
            InvalidArgumentError: if the consumer is unknown, if no name was given and there are several consumers, if
                an option is neither True nor False, if ``top_k`` is invalid or has no ``score`` in a mode without a
                default score, if its ``score`` returns NaN or a wrong shape, or if another rank fails in a read with
                ``top_k``.
            ReservedConsumerError: if the consumer is reserved. Read it with its :class:`ConsumerHandle`.
            NeedsSnapshotError: if the consumer was dropped because the log exceeded ``max_bytes``.
            StaleDeltaError: if the function ``score`` of ``top_k`` reads, clears or rewinds the same consumer.
            RankLostError: if ``top_k`` is given and a rank died or did not make the call in time.
            UnsupportedModelError: if ``with_optimizer`` is True and the optimizer of a table is not fused, or if a
                managed-collision module has raw ids that cannot be published: one id for two rows, an id in another
                rank's range, an id for a default row, or the id 2**63 - 1.
            DetachedError: after :meth:`detach`.
        """
        _check_options(unknown)
        check_switch("commit", commit)
        check_switch("with_states", with_states)
        check_switch("with_values", with_values)
        check_switch("with_optimizer", with_optimizer)
        self._hooks.check_read()
        return self._reader.read(
            self._log.consumers.resolve(consumer),
            lambda delta: delta,
            commit=commit,
            with_states=with_states,
            with_values=with_values,
            with_optimizer=with_optimizer,
            top_k=top_k,
        )

    def get_delta_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Read the changed rows, commit the read, and return the local ids of the rows, ``[N]`` int64 by table FQN."""
        self._hooks.check_read()
        return self._reader.read(
            self._log.consumers.resolve(consumer), lambda delta: {fqn: rows.ids for fqn, rows in delta.items()}
        )

    def commit(self, delta: Delta) -> None:
        """Commit the read that returned ``delta``. This moves the consumer's cursor to the end of the read.

        Raises:
            InvalidArgumentError: if ``delta`` is not a :class:`~delta_tracker.types.Delta`, or if its consumer was
                removed.
            StaleDeltaError: if the read was already committed or discarded.
        """
        _check_delta(delta)
        self._log.consumers.commit(self._log.consumers.uncommitted(delta))

    def abort(self, delta: Delta) -> None:
        """Discard the read that returned ``delta``. Its rows stay pending. Raises the same errors as :meth:`commit`."""
        _check_delta(delta)
        self._log.consumers.abort(self._log.consumers.uncommitted(delta))

    def read_rows(self, fqn: str, ids: Tensor | None = None) -> Tensor:
        """Return a copy of this rank's current rows of a table.

        Args:
            fqn: FQN of the table.
            ids: ``[N]`` integer local ids; None for all rows.

        Returns:
            ``[N, D]`` in the table's dtype. The columns are the ranges ``shards[fqn].columns``.

        Raises:
            InvalidArgumentError: if the table is not tracked or an id is outside the shard.
        """
        shard = self._model.shard(fqn)
        if ids is not None:
            shard.spec.check_ids(ids)
            ids = to_device(ids, shard.device)
        return read_rows(shard, ids)

    def read_tables(self, ids: Mapping[str, Tensor | None] | None = None) -> dict[str, Tensor]:
        """Return a copy of this rank's current rows of several tables, by table FQN.

        Faster than one call to :meth:`read_rows` for each table, and raises the same errors. ``ids`` maps table FQNs to
        ``[N]`` integer local ids, or to None for all rows. If ``ids`` is None, all rows of all tables are returned.
        """
        if ids is not None and not isinstance(ids, Mapping):
            raise InvalidArgumentError("ids", ids, "Pass a mapping of table FQN to ids, or None for all tables")
        with one_cut():
            return {
                fqn: self.read_rows(fqn, table_ids)
                for fqn, table_ids in (dict.fromkeys(self.tables) if ids is None else ids).items()
            }

    # Checkpoints

    @property
    def checkpoint(self) -> TrackerCheckpoint:
        """Object that saves and loads the tracker's state. Used by checkpoint adapters and by ``restore``."""
        return self._checkpoint

    @property
    def restored(self) -> LoadOutcome | None:
        """Outcome of the last :meth:`load_state_dict` or :func:`~delta_tracker.restore`; None before the first call."""
        return self._checkpoint.restored

    def register_counter(self, name: str, counter: object) -> None:
        """Register a counter, such as a metric, to save and load it with the tracker's state.

        If the world size is unchanged, loading restores the state of each rank. If it differs, loading restores the
        counter's total over all ranks, and rejects a metric if a state's reduction is not sum, max, min or cat.

        Buffers of a metric that are not states, such as thresholds, are not saved. They must be equal when the saved
        and the loading metric are registered. If updates change such a buffer, register before the first update.

        Args:
            name: key of the counter in the saved state. It must be the same on every rank.
            counter: a ``torchmetrics.Metric`` that contains no other metric and is not part of a collection with
                compute groups, or a :class:`~delta_tracker.tracker.checkpoint.counters.Mergeable`.

        Raises:
            InvalidArgumentError: if the type of the counter is unsupported, or if the name is empty, taken or contains
                a slash.
        """
        self._checkpoint.counters.register(name, counter)

    def state_dict(self, *, strategy: Strategy = "local") -> dict[str, Tensor]:
        """Return the state to save in a checkpoint: pending rows and notes of all consumers, and registered counters.

        Pending rows include the rows of uncommitted reads and rows whose update is in progress. No cursor is moved.
        Call this method directly before or after the model's ``state_dict``, without an update between the two calls.

        Args:
            strategy: ``"local"`` returns this rank's part without a collective. Every rank then saves its own part.
                ``"gather"`` is a collective. It returns the parts of all ranks on rank 0, and an empty dict on the
                other ranks. ``"gather_or_local"`` is the same collective, but returns this rank's part on the other
                ranks.

        Returns:
            Copies of the state as CPU tensors, by key. Different ranks have different keys. The format is defined in
            :mod:`delta_tracker.tracker.checkpoint.part`.

        Raises:
            DetachedError: if the tracker is detached, because later updates were not recorded.
            UnsupportedModelError: if a table can no longer be tracked, for example because its module was replaced.
            RankFailedError: if the strategy is a collective and another rank raised one of these errors.
            InvalidArgumentError: if the strategy is unknown, if the state of a counter cannot be saved, or if rows
                changed since the last ``sync()`` of a ``DMPCollection``. If the strategy is a collective, every rank
                raises this error when rows changed on one rank.
            RankLostError: if the strategy is a collective and a rank died or did not make the call in time.
        """
        return self._checkpoint.state_dict(strategy=strategy)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all pending rows, notes and counters with those of a saved state. Load the model's state first.

        On every rank, pass the saved parts of all ranks, merged into one dict. The parts that cover the rank's shards
        and counters are sufficient. If the world size and the sharding plan are unchanged, the rank's own part is
        sufficient. Uncommitted reads are aborted. A call that raises one of the following errors changes nothing. If
        the call is interrupted or memory runs out, all rows may become pending.

        Args:
            state: merged results of :meth:`state_dict`. Pass an empty dict if the checkpoint has no tracker state. All
                rows are then pending for every consumer, and :attr:`restored` is ``LoadOutcome.NOTHING``.

        Raises:
            StateMismatchError: if the format version is unknown, if the mode, consumers, tables or counters differ, if
                the column ranges of old states differ, or if the world size differs and a counter cannot be merged.
            CheckpointError: if parts are missing, or if the state is otherwise invalid.
            InvalidArgumentError: if ``state`` is not a mapping.
            ReservedConsumerError: if a consumer is reserved. Create publishers after this call: they reserve consumers.
        """
        self._checkpoint.load_state_dict(state)

    # Attaching

    def reattach(self) -> None:
        """Attach to the model's current modules and shards, for example after TorchRec has resharded the model.

        Call it between the backward pass of one batch and the forward pass of the next batch. The following tables keep
        their recorded changes:

        - Tables whose shard and lookup module on this rank are unchanged, if :meth:`detach` was not called.
        - Tables without a fused optimizer whose shard is unchanged, if lookups are not recorded.

        All rows of other tables are marked as changed for every consumer. For a table whose shard changed, the raw ids
        of earlier reads become unknown. Tables that are no longer in the model are not tracked any more, and their
        pending rows are dropped. If the call raises the following error, or if memory for new stores runs out, the
        tracker does not change. After any other error or an interrupt, the tracker is detached: call this method again.

        Raises:
            UnsupportedModelError: if the model cannot be tracked, see :class:`ModelDeltaTracker`.
        """
        try:
            found = self._model.discover()
        except UnsupportedModelError as error:
            remedy = (
                "Undo the change of the model, or detach the tracker and build one with their names in fqns_to_skip"
            )
            raise error.with_remedy(remedy) from None
        owners = local_owners(self._model.module, found)
        held, compared = self._model.shards, self._log.segments.owners
        moved = [
            fqn
            for fqn, shard in found.shards.items()
            if fqn not in held or _form(shard) != _form(held[fqn]) or (fqn in owners) != (fqn in compared)
        ]
        unseen = [
            fqn
            for fqn, shard in found.shards.items()
            if fqn not in moved
            and (not shard.is_compared or self._records_lookups)
            and not (self._model.is_attached and _modules(shard) == _modules(held[fqn]))
        ]
        owned = {fqn: source for fqn, source in owners.items() if fqn in moved}
        known = self._model.found
        self._model.take(found)
        try:
            stores, copies = self._make_stores(moved), self._make_owners(owned)  # first: it takes memory
            self._hooks.remove()
            self._log.replace(stores, copies, gone=held.keys() - found.shards.keys())
        except BaseException:
            self._model.found, self._model.shards = known, held
            raise
        self._model.shards = dict(found.shards)
        for fqn in owners.keys() - owned.keys():
            compared[fqn].attach(owners[fqn])
        for fqn in unseen:
            self._log.writes.mark(fqn, None, is_written=True)
        self._hooks.attach()
        announce_training(self._live)

    def detach(self) -> None:
        """Remove all hooks. Later reads raise DetachedError. Idempotent. Deleting the tracker also removes hooks."""
        self._hooks.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _make_stores(self, fqns: Iterable[str]) -> dict[str, SegmentStore]:
        shard = self._model.shard
        with one_cut():
            return {fqn: make_store(partial(shard, fqn), self._capture, engine=self._engine) for fqn in fqns}

    def _make_owners(self, sources: Mapping[str, LocalOwners]) -> dict[str, OwnerStore]:
        return {fqn: OwnerStore(source, engine=self._engine) for fqn, source in sources.items()}

    def _show_gauges(self) -> None:
        self._gauges.show(self._log)


def _form(shard: LocalShard) -> tuple[ShardSpec, bool, bool]:
    return shard.spec, shard.is_fused, shard.is_stepped


def _modules(shard: LocalShard) -> list[tuple[object, int]]:
    return [(kernel.module, slot) for kernel, slot in shard.holders]


def _check_options(unknown: Mapping[str, object]) -> None:
    for name, value in unknown.items():
        raise InvalidArgumentError(name, value, f"Pass {_OF_TORCHREC.get(name, _OPTIONS)}")


def _check_delta(delta: object) -> None:
    if not isinstance(delta, Delta):
        raise InvalidArgumentError("delta", delta, "Pass the Delta that get_delta(commit=False) returned")
