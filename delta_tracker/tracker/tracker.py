"""ModelDeltaTracker, the one object that a trainer meets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Literal, Self, get_args

from torch import Tensor, nn

from delta_tracker.buffers import MEMORY
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.discover import LocalShard
from delta_tracker.sharding.kernel_hooks import KeyedIds, PostLookupHook, Watcher
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.odist_hook import watch_output_dists
from delta_tracker.sharding.torchrec_api import load_torchrec
from delta_tracker.sharding.weights import column_views, read_rows
from delta_tracker.sharding.write_hooks import watch_writes
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.rank_header import RankHeader
from delta_tracker.tracker.checkpoint.reshard import Resharding
from delta_tracker.tracker.checkpoint.tracker_checkpoint import Restored, Strategy, TrackerCheckpoint
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.gauges import TrackerGauges
from delta_tracker.tracker.lookup_recorder import LookupRecorder
from delta_tracker.tracker.modes import CAPTURES, UPDATE_MODE_MAP
from delta_tracker.tracker.store.make_store import make_store
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.top_k import TopK
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta, Memory, ShardSpec, TableSpec, TrackingMode

__all__ = ["UPDATE_MODE_MAP", "ModelDeltaTracker", "Record"]

_logger = logging.getLogger(__name__)

Record = Literal["updates", "lookups"]


def __getattr__(name: str) -> object:
    """Return the sharded module classes ``SUPPORTED_MODULES`` that a tracker follows; subclasses count too.

    They are TorchRec's, which is imported when the name is used first.
    """
    if name == "SUPPORTED_MODULES":
        return tuple(load_torchrec().collections)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ModelDeltaTracker:
    """Keeps which rows of a model's sharded embedding tables changed, for any number of consumers.

    A row counts as changed when an update of it is written, not when it is looked up: passes under ``no_grad`` and
    outputs that are never backpropagated leave no trace. A read may happen at any moment between two operations of
    the training thread; nothing is lost by it. Every rank tracks its own shards, without any collective, except that
    a read with ``top_k`` is one.

    Tables whose optimizer is not fused (DENSE kernels, DATA_PARALLEL) are compared with a second copy at each read:
    that is right for momentum, Adam, weight decay and other ranks' gradients, and costs the copy.

    ``load_state_dict`` changes all rows of the other tables. So do in-place writes to their weights, such as
    ``dcp.load({"model": model.state_dict()}, ...)`` or an edit under ``no_grad``: all rows of every table of the same
    kernel are then pending, with unknown old values. Torch does not count collectives that write to the weights
    (``broadcast``, ``all_reduce``), and writes through ``.data``, ``untyped_storage()``, DLPack, numpy and raw
    pointers: call :meth:`mark_changed` after them.

    On each rank: build it once the model is sharded; :meth:`step` after each batch; :meth:`get_delta` at any time.

    Args:
        model: a ``DistributedModelParallel``, or any module that contains sharded EmbeddingCollections or
            EmbeddingBagCollections, or subclasses of theirs.
        consumers: names of the independent readers; one named ``"default"`` if not given.
        delete_on_read: forget rows once every consumer has committed a read of them. False keeps them all, so that
            :meth:`rewind` can take a consumer back to the start; it costs at most one set of rows more.
        auto_compact: merge the log, and drop rows that every consumer has committed, in the post-odist hook: after a
            collection has launched its output distribution, overlapped with the communication. Otherwise at every
            read. Old states on a GPU are merged at reads in either case, because merging them waits for the device.
        mode: what is kept of a changed row.
        fqns_to_skip: tables to leave alone, each by its FQN, the FQN of a module above it, or one component of it.
        record: ``"updates"``; or ``"lookups"`` to count every lookup as a change too, as TorchRec's tracker does.
        max_bytes: how much the log may hold on this rank. Above it the consumer that stands furthest back is given
            up, and its next read raises :class:`~delta_tracker.errors.NeedsSnapshotError`. None for no bound.
        engine: which kernels keep the rows, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.
        monitor: where this tracker records its metrics; None for ``delta_tracker.monitor.MONITOR``.
        name: the label ``tracker`` of these metrics; ``"tracker"`` if None. A name that another tracker of this process
            has is followed by ``-2``, ``-3``, ...

    Raises:
        NoShardedModuleError: if the model has nothing to track.
        UnsupportedModuleError: if the model has sharded modules that cannot be followed, such as a ``DMPCollection``.
        UnsupportedOptimizerError: if a fused optimizer writes rows outside the backward pass, or is unknown.
        UnsupportedTableError: if a table's kernel cannot be followed, or its optimizer cannot serve the mode.
        InvalidArgumentError: for consumers that are not different names, or an unknown mode, record or engine.
        MissingExtraError: if torchrec is not installed.
    """

    DEFAULT_CONSUMER = "default"

    def __init__(  # noqa: PLR0913  the seed interface's, and three
        self,
        model: nn.Module,
        consumers: Sequence[str] | None = None,
        delete_on_read: bool = True,  # noqa: FBT001, FBT002  positional as in the seed interface
        auto_compact: bool = False,  # noqa: FBT001, FBT002
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
        *,
        record: Record = "updates",
        max_bytes: int | None = None,
        engine: str | None = None,
        monitor: Monitor | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(mode, TrackingMode):
            raise InvalidArgumentError("mode", mode, f"Pass one of {[str(known) for known in TrackingMode]}")
        if record not in get_args(Record):
            raise InvalidArgumentError("record", record, f"Pass one of {get_args(Record)}")
        self._mode = mode
        self._records_lookups = record == "lookups"
        self._engine = engine
        self._capture = CAPTURES[mode]
        self._model = TrackedModel(model, fqns_to_skip, self._capture)
        self._metrics = Recorder("tracker", self, name=name, monitor=monitor)
        self._gauges = TrackerGauges(self._metrics)
        self._log = ChangeLog(
            self._make_stores(self._model.shards),
            [self.DEFAULT_CONSUMER] if consumers is None else consumers,
            delete_on_read=delete_on_read,
            auto_compact=auto_compact,
            max_bytes=max_bytes,
            received=self._gauges.received,
        )
        self._reader = DeltaReader(self._log, self._model, self._capture)
        self._recorder = LookupRecorder(self._log, self._model, mode)
        self._checkpoint = TrackerCheckpoint(self._log, self._model, mode, self._capture, self._metrics.monitor)
        self._keys = itertools.count()
        self._num_past_errors = 0
        self._hooks = self._attach()
        self._log_tables()
        self._metrics.watch(ModelDeltaTracker._show_gauges)

    # What is tracked

    @property
    def model(self) -> nn.Module:
        """The tracked model."""
        return self._model.module

    @property
    def mode(self) -> TrackingMode:
        """What is kept of a changed row."""
        return self._mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """FQN to table, the same on every rank."""
        return MappingProxyType(self._model.found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """FQN to the block that this rank holds, with no rows where it holds none."""
        return {fqn: shard.spec for fqn, shard in self._model.shards.items()}

    @property
    def fused_tables(self) -> frozenset[str]:
        """FQNs of the tables whose optimizer is fused, the same on every rank: each write of theirs is seen."""
        return frozenset(fqn for fqn, shard in self._model.shards.items() if shard.is_fused)

    @property
    def num_hook_errors(self) -> int:
        """Faults inside hooks since the start; each was contained and made its tables count as wholly changed."""
        return self._num_past_errors + sum(hook.num_errors for hook in self._hooks)

    @property
    def tracked_modules(self) -> Mapping[str, nn.Module]:
        """FQN to sharded embedding module, as :meth:`get_tracked_modules`."""
        return MappingProxyType(self._model.found.modules)

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """FQN to sharded embedding module."""
        return dict(self._model.found.modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Table FQN to the names of the features that are looked up in it."""
        return {fqn: list(names) for fqn, names in self._model.found.features.items()}

    @property
    def feature_to_fqn(self) -> dict[str, str]:
        """Feature name to the FQN of the table that it is looked up in, the first one if there are several."""
        found: dict[str, str] = {}
        for fqn, names in self._model.found.features.items():
            for name in names:
                found.setdefault(name, fqn)
        return found

    @property
    def store(self) -> Mapping[str, SegmentStore]:
        """Table FQN to the store of its changed rows, as they are now. Read it between two batches; do not write."""
        return MappingProxyType(self._log.stores)

    # Training

    @property
    def num_batches(self) -> int:
        """How often :meth:`step` was called."""
        return self._log.num_batches

    @property
    def curr_batch_idx(self) -> int:
        """The index of the present batch: how often :meth:`step` was called, as :attr:`num_batches`."""
        return self._log.num_batches

    @property
    def curr_compact_index(self) -> int:
        """:attr:`curr_batch_idx` at the last compaction; 0 before the first."""
        return self._log.num_compacted

    @property
    def per_consumer_batch_idx(self) -> dict[str, int]:
        """Consumer to :attr:`curr_batch_idx` at its last committed read: its next delta's ``batches`` begin there.

        0 for a consumer of the constructor that has not read.
        """
        return self._log.batches

    def step(self) -> None:
        """Count one batch. It orders the log for people; no update is lost if nobody calls it."""
        self._log.step()

    def mark_changed(self, fqn: str, ids: Tensor | None = None) -> None:
        """Say that rows were changed from outside; their old values count as unknown.

        Needed only after writes that torch does not count: collectives that write to the weights, and writes through
        ``.data``, ``untyped_storage()``, DLPack, numpy or raw pointers. Other in-place writes are found without it.

        Args:
            fqn: the table.
            ids: ``[N]`` integer local ids, in any order; None for all rows.

        Raises:
            InvalidArgumentError: for a table that is not tracked, or ids outside the shard; nothing is marked.
        """
        spec = self._model.shard(fqn).spec
        if ids is not None:
            spec.check_ids(ids)
        self._log.mark(fqn, ids, is_written=True)

    def record_ids(self, kjt: KeyedIds) -> None:
        """Count the ids of a lookup that the hooks do not see as changed. Nothing needs it that the hooks see.

        Args:
            kjt: a KeyedJaggedTensor of local ids; a feature counts for every table that it is looked up in.
        """
        self._recorder.record_ids(kjt)

    def record_embeddings(self, kjt: KeyedIds, embeddings: Tensor) -> None:
        """As :meth:`record_ids`, with the rows as they were before the change.

        Args:
            kjt: a KeyedJaggedTensor of local ids.
            embeddings: the rows, in the order of ``kjt.values()``; any shape with one row for each id.

        Raises:
            InvalidArgumentError: outside EMBEDDING mode, or for another number of rows.
        """
        self._recorder.record_embeddings(kjt, embeddings)

    def record_lookup(self, kjt: KeyedIds, states: Tensor) -> None:
        """:meth:`record_embeddings` in EMBEDDING mode, :meth:`record_ids` in the others, which need no ``states``."""
        self._recorder.record_lookup(kjt, states)

    # Consumers

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return self._log.consumers

    def add_consumer(self, consumer: str) -> None:
        """Add a consumer, to which rows are pending that change from now on.

        Args:
            consumer: its name.

        Raises:
            InvalidArgumentError: if it exists.
        """
        self._log.add(consumer)

    def remove_consumer(self, consumer: str) -> None:
        """Remove a consumer and what only it needed.

        Raises:
            UnknownConsumerError: if there is no such consumer.
            ReservedConsumerError: if it is reserved.
        """
        self._log.remove(self._log.resolve(consumer))

    def reserve(self, consumer: str | None = None, *, holder: str = "a ConsumerHandle") -> ConsumerHandle:
        """Reserve a consumer: until the handle is released, nothing but the handle can read, move or remove it.

        Args:
            consumer: which; may be left out when there is only one.
            holder: who reserves it, as a :class:`~delta_tracker.errors.ReservedConsumerError` names it.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if it is reserved already.
            DetachedError: after :meth:`detach`.
        """
        self._model.check_attached()
        name = self._log.reserve(consumer, holder)
        return ConsumerHandle(
            name, holder, log=self._log, model=self._model, reader=self._reader, checkpoint=self._checkpoint
        )

    def needs_snapshot(self, consumer: str | None = None) -> bool:
        """Return True if a consumer was given up to bound memory, so that only all rows bring it up to date.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        return self._log.is_behind(consumer)

    def clear(self, consumer: str | None = None) -> None:
        """Forget what is pending for a consumer, or for all of them if none is named.

        It is also the way back for a consumer that was given up: clear it, then give it all rows (:meth:`read_rows`).

        Raises:
            UnknownConsumerError: if there is no such consumer.
            ReservedConsumerError: if it is reserved.
        """
        for name in self._log.consumers if consumer is None else [consumer]:
            self._log.clear(self._log.resolve(name))

    def rewind(self, consumer: str | None = None) -> None:
        """Let a consumer read again everything that changed since the tracker was built; aborts its open read.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if it is reserved.
            InvalidArgumentError: if the tracker forgets what was read (``delete_on_read=True``).
        """
        self._log.rewind(self._log.resolve(consumer))

    # Memory

    def memory(self) -> Memory:
        """Return the bytes that the tracker holds now."""
        return self._log.memory()

    @property
    def num_recorded(self) -> Mapping[str, int]:
        """Table FQN to how many rows were recorded as changed on this rank since the start, repeats included.

        Between two calls of :meth:`num_pending` that number cannot grow by more than this one does. It costs nothing.
        """
        return MappingProxyType(self._log.num_recorded)

    def num_pending(self, consumer: str | None = None) -> dict[str, int]:
        """Table FQN to how many rows of this rank a read would give the consumer now. Waits for the device.

        It takes nothing, so it may be called for a reserved consumer too. A table whose optimizer is not fused counts
        nothing here until a read compares it with its copy.

        Args:
            consumer: who would read; may be left out when there is only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        return self._log.num_pending(consumer)

    def compact(self, start_idx: int = 0, end_idx: int | None = None) -> None:
        """Drop what every consumer has committed and merge what no cursor tells apart.

        Reads give the same rows before and after. The log keeps no batches apart, so what of a range has been compacted
        already is not compacted again, and any other range compacts all of the log.

        Args:
            start_idx: the first batch of the range.
            end_idx: the batch behind the range, at most ``curr_batch_idx + 1``; None for all up to now, which always
                compacts.

        Raises:
            InvalidArgumentError: for a range that is empty, begins before 0 or ends behind the present batch.
        """
        if end_idx is None:
            end, is_done = self._log.num_batches + 1, False
        else:
            end, is_done = end_idx, end_idx <= self._log.num_compacted
        if not 0 <= start_idx < end <= self._log.num_batches + 1:
            remedy = f"Pass 0 <= start_idx < end_idx <= {self._log.num_batches + 1}"
            raise InvalidArgumentError("start_idx, end_idx", (start_idx, end_idx), remedy)
        if not is_done:
            self._log.compact()

    def trigger_compaction(self) -> None:
        """Compact the whole log: :meth:`compact` without a range."""
        self._log.compact()

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
    ) -> Delta:
        """The rows that changed since the consumer's last committed read.

        Args:
            consumer: who reads; may be left out when there is only one.
            commit: move the cursor now. With False it stays until :meth:`commit`, and the rows stay pending; a new
                read replaces the uncommitted one and covers its rows too.
            with_states: add ``states``, in a mode that has them. Without, the read copies none, so that it holds the
                log's lock no longer than in ``ID_ONLY`` mode.
            with_values: add ``values``, the rows as they are now, ``[N, D]`` in the table's dtype.
            with_optimizer: add ``optimizer``, the fused optimizer's states of the rows as they are now.
            top_k: read a part of the rows only, those that changed most; the others stay pending. Every rank must
                then make this call. A DATA_PARALLEL table is chosen from on rank 0; the others' deltas hold all of it.

        Returns:
            Table FQN to rows; a table without changes is present and empty. Rows whose update is under way at the
            read are in it and will be in the next one too. The tensors are the caller's own.

        A read that raises changes nothing: the earlier uncommitted read can still be committed.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if it is reserved: read it with its :class:`ConsumerHandle`.
            NeedsSnapshotError: if the consumer was given up to bound memory.
            InvalidArgumentError: for a ``top_k`` without a score in a mode that has none, or scores that are NaN.
            UnsupportedTableError: for ``with_optimizer`` where an optimizer is not fused.
            DetachedError: after :meth:`detach`.
        """
        name = self._log.resolve(consumer)
        return self._reader.read(
            name,
            commit=commit,
            with_states=with_states,
            with_values=with_values,
            with_optimizer=with_optimizer,
            top_k=top_k,
        )

    def get_delta_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Table FQN to ``[N]`` int64 local ids of :meth:`get_delta`, which this call is otherwise the same as."""
        return {fqn: rows.ids for fqn, rows in self.get_delta(consumer).items()}

    def commit(self, delta: Delta) -> None:
        """Move the consumer's cursor past an uncommitted read.

        Raises:
            StaleDeltaError: if ``delta`` is not the consumer's uncommitted read any more.
        """
        self._log.commit(delta)

    def abort(self, delta: Delta) -> None:
        """Forget an uncommitted read; its rows stay pending.

        Raises:
            StaleDeltaError: if ``delta`` is not the consumer's uncommitted read any more.
        """
        self._log.abort(delta)

    def read_rows(self, fqn: str, ids: Tensor | None = None) -> Tensor:
        """A copy of the rows that this rank holds now.

        Args:
            fqn: the table.
            ids: ``[N]`` int64 local ids; None for all of them.

        Returns:
            ``[N, D]`` in the table's dtype, columns as in ``shards[fqn].columns``.

        Raises:
            InvalidArgumentError: for a table that is not tracked.
        """
        return read_rows(self._model.shard(fqn), ids)

    def read_tables(self, ids: Mapping[str, Tensor | None] | None = None) -> dict[str, Tensor]:
        """A copy of the rows of several tables that this rank holds now.

        Takes time linear in the number of tables. :meth:`read_rows` flushes and splits a whole kernel for each table.

        Args:
            ids: FQN to ids as in :meth:`read_rows`; None for all rows of all tables.

        Returns:
            FQN to rows as in :meth:`read_rows`.

        Raises:
            InvalidArgumentError: for a table that is not tracked.
        """
        with one_cut():
            return {
                fqn: self.read_rows(fqn, table_ids)
                for fqn, table_ids in (dict.fromkeys(self.tables) if ids is None else ids).items()
            }

    def column_views(self, fqn: str) -> list[Tensor]:
        """Live views ``[R, columns]`` of this rank's rows, one for each range in ``shards[fqn].columns``.

        Training writes to them; copy before the next batch what must stay.

        Raises:
            InvalidArgumentError: for a table that is not tracked.
        """
        return column_views(self._model.shard(fqn))

    # Checkpoints

    @property
    def restored(self) -> Restored | None:
        """What the last :meth:`load_state_dict` found; None before the first."""
        return self._checkpoint.restored

    @property
    def annotations(self) -> Mapping[str, object]:
        """Consumer to the note that its handle made, here or in the state that was loaded last."""
        return self._checkpoint.annotations

    def register_counter(self, name: str, counter: object) -> None:
        """Save and load a figure of which every rank keeps a part, so that its total over the ranks is restored.

        Args:
            name: what it is saved as; the same on every rank.
            counter: a ``torchmetrics.Metric`` whose states are reduced by sum, max, min or cat, or a
                :class:`~delta_tracker.tracker.checkpoint.counters.Mergeable`.

        Raises:
            InvalidArgumentError: for anything else, or a name that is taken or has a slash in it.
        """
        self._checkpoint.register_counter(name, counter)

    def state_dict(self, *, strategy: Strategy = "local") -> dict[str, Tensor]:
        """What is pending for every consumer, what was registered, and what was annotated. Moves no cursor.

        Rows of sealed reads and of batches that are under way count as pending. Take it when you take the model's
        state, with no update between them. The tensors are on the CPU and stay as they are when training goes on.

        Args:
            strategy: ``"local"`` for this rank's part, without any collective; every rank saves its own. ``"gather"``
                for all parts on rank 0, counters merged, and nothing on the others; a collective.

        Returns:
            Key to tensor; keys of different ranks differ. The format is in
            :mod:`delta_tracker.tracker.checkpoint.rank_header`.

        Raises:
            InvalidArgumentError: for another strategy.
            RankLostError: if a rank died or did not call it in time.
        """
        return self._checkpoint.state_dict(strategy=strategy)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a saved state over, in place of all that is pending now. Restore the model first.

        Every rank passes the parts of all ranks that saved (their keys differ, so that the dicts can be merged), or
        as many of them as cover its shards: its own part alone if world size and plan are as they were. Open reads
        are aborted.

        Args:
            state: parts of :meth:`state_dict`; an empty one stands for a checkpoint without any: all rows then count
                as changed for every consumer, which is logged and shown by :attr:`restored`.

        Raises:
            UnknownFormatError: for a format version that is not known.
            StateMismatchError: for a state of another mode, other consumers, tables or counters, or one whose old
                states belong to other column ranges; it names what differs.
            PartialStateError: if parts are missing.
            MalformedStateError: for anything else that is no saved state. After any error all is as it was.
            ReservedConsumerError: if a publisher reads as one of the consumers: build it after this.
        """
        self._checkpoint.load_state_dict(state)

    def plan_load(self, parts: list[RankHeader]) -> Resharding:
        """What :meth:`load_state_dict` would take out of which part.

        Args:
            parts: headers, at least one.

        Raises:
            StateMismatchError: if they are of something else.
            PartialStateError: if parts are missing.
        """
        return self._checkpoint.plan_load(parts)

    # Attaching

    def reattach(self) -> None:
        """Watch the model's present modules and shards, after TorchRec resharded it; with no backward still to come.

        A table whose block and lookup module on this rank are as they were keeps its log. Of any other one, and of all
        after :meth:`detach`, all rows held now count as changed, for every consumer: nobody watched them meanwhile.

        Raises: as the constructor; the tracker is then as it was.
        """
        found = self._model.discover()
        held = self._model.shards
        moved = [fqn for fqn, shard in found.shards.items() if fqn not in held or shard.spec != held[fqn].spec]
        unseen = [
            fqn
            for fqn, shard in found.shards.items()
            if fqn not in moved
            and (shard.is_fused or self._records_lookups)
            and not (self._model.is_attached and _modules(shard) == _modules(held[fqn]))
        ]
        self._remove_hooks()
        self._model.take(found)
        self._log.replace(self._make_stores(moved))
        for fqn in unseen:
            self._log.mark(fqn, None, is_written=True)
        self._hooks = self._attach()

    def detach(self) -> None:
        """Remove every hook; afterwards reads raise :class:`DetachedError`. Calling it again does nothing."""
        self._remove_hooks()
        self._model.is_attached = False
        MEMORY.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _log_tables(self) -> None:
        for fqn, table in self._model.found.tables.items():
            features = self._model.found.features.get(fqn, [])
            _logger.info("tracking table %s (%s) in mode %s, features %s", fqn, table, self._mode.value, features)

    def _attach(self) -> list[Watcher]:
        self._model.is_attached = True
        MEMORY.join(self)
        model, found, lookups = self._model.module, self._model.found, self._records_lookups
        return [
            *(
                PostLookupHook(kernel, self._log, self._keys, self._metrics, lookups=lookups)
                for kernel in found.kernels
            ),
            *watch_output_dists(model, found, self._log, self._keys, self._metrics),
            *watch_writes(model, found, self._log, self._keys, self._metrics),
        ]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._num_past_errors, self._hooks = self.num_hook_errors, []

    def _make_stores(self, fqns: Iterable[str]) -> dict[str, SegmentStore]:
        with one_cut():
            return {fqn: self._make_store(fqn) for fqn in fqns}

    def _show_gauges(self) -> None:
        self._gauges.show(self._log, self._model)

    def _make_store(self, fqn: str) -> SegmentStore:
        return make_store(partial(self._model.shard, fqn), self._capture, engine=self._engine)


def _modules(shard: LocalShard) -> list[tuple[object, int]]:
    return [(kernel.module, slot) for kernel, slot in shard.places]
