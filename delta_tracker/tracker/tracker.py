"""ModelDeltaTracker, the one object that a trainer meets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Literal, Self, get_args

from torch import Tensor, nn

from delta_tracker.buffers import MEMORY
from delta_tracker.errors import DetachedError, InvalidArgumentError
from delta_tracker.sharding.discover import Discovery, LocalShard, discover
from delta_tracker.sharding.kernel_hooks import KernelHook, Watcher
from delta_tracker.sharding.refusals import refuse_unseen_writes
from delta_tracker.sharding.weights import column_views, read_rows
from delta_tracker.sharding.write_hooks import watch_writes
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.checkpoint.stateful import Checkpointed
from delta_tracker.tracker.consumers import Consumers
from delta_tracker.tracker.delta_reader import DeltaReader
from delta_tracker.tracker.lookup_recorder import LookupRecorder
from delta_tracker.tracker.modes import CAPTURES, make_store
from delta_tracker.tracker.pending import PendingRows
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.top_k import TopK
from delta_tracker.types import Delta, ShardSpec, TableSpec, TrackingMode

Record = Literal["updates", "lookups"]


class ModelDeltaTracker(LookupRecorder, PendingRows, Consumers, Checkpointed):
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
        auto_compact: merge the log, and forget what was read, at every :meth:`step`; otherwise at every read.
        mode: what is kept of a changed row.
        fqns_to_skip: tables to leave alone, each by its FQN, the FQN of a module above it, or one component of it.
        record: ``"updates"``; or ``"lookups"`` to count every lookup as a change too, as TorchRec's tracker does.
        max_bytes: how much the log may hold on this rank. Above it the consumer that stands furthest back is given
            up, and its next read raises :class:`~delta_tracker.errors.NeedsSnapshotError`. None for no bound.
        engine: which kernels keep the rows, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.

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
    ) -> None:
        if not isinstance(mode, TrackingMode):
            raise InvalidArgumentError("mode", mode, f"Pass one of {[str(known) for known in TrackingMode]}")
        if record not in get_args(Record):
            raise InvalidArgumentError("record", record, f"Pass one of {get_args(Record)}")
        self._model = model
        self._mode = mode
        self._capture = CAPTURES[mode]
        self._records_lookups = record == "lookups"
        self._engine = engine
        self._skips = fqns_to_skip if isinstance(fqns_to_skip, str) else tuple(fqns_to_skip)
        self._found = self._discover()
        self._shards = self._found.shards
        self._log = ChangeLog(
            {fqn: self._make_store(fqn) for fqn in self._shards},
            [self.DEFAULT_CONSUMER] if consumers is None else consumers,
            delete_on_read=delete_on_read,
            auto_compact=auto_compact,
            max_bytes=max_bytes,
        )
        self._reader = DeltaReader(self._shards, self._capture)
        self._keys = itertools.count()
        self._num_past_errors = 0
        self._hooks = self._attach()
        Checkpointed.__init__(self)
        PendingRows.__init__(self)

    # What is tracked

    @property
    def mode(self) -> TrackingMode:
        """What is kept of a changed row."""
        return self._mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """FQN to table, the same on every rank."""
        return MappingProxyType(self._found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """FQN to the block that this rank holds, with no rows where it holds none."""
        return {fqn: shard.spec for fqn, shard in self._shards.items()}

    @property
    def num_hook_errors(self) -> int:
        """Faults inside hooks since the start; each was contained and made its tables count as wholly changed."""
        return self._num_past_errors + sum(hook.num_errors for hook in self._hooks)

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """FQN to sharded embedding module."""
        return dict(self._found.modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Table FQN to the names of the features that are looked up in it."""
        return {fqn: list(names) for fqn, names in self._found.features.items()}

    # Training

    @property
    def num_batches(self) -> int:
        """How often :meth:`step` was called."""
        return self._log.num_batches

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
        spec = self._shard(fqn).spec
        if ids is not None:
            spec.check_ids(ids)
        self._log.mark(fqn, ids, is_written=True)

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
        owner: object = None,
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
            owner: who reserved the consumer, see :meth:`reserve`.

        Returns:
            Table FQN to rows; a table without changes is present and empty. Rows whose update is under way at the
            read are in it and will be in the next one too. The tensors are the caller's own.

        A read that raises changes nothing: the earlier uncommitted read can still be committed.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            ReservedConsumerError: if it is reserved by somebody else than ``owner``.
            NeedsSnapshotError: if the consumer was given up to bound memory.
            InvalidArgumentError: for a ``top_k`` without a score in a mode that has none, or scores that are NaN.
            UnsupportedTableError: for ``with_optimizer`` where an optimizer is not fused.
            DetachedError: after :meth:`detach`.
        """
        name = self._log.resolve(consumer, owner)
        if not self._is_attached:
            raise DetachedError
        self._reader.check(top_k, with_optimizer=with_optimizer)
        with self._log.lock:
            reading = self._log.read(name, with_states=with_states or top_k is not None)
            try:
                delta = self._reader.delta(
                    reading,
                    top_k=top_k,
                    with_states=with_states,
                    with_values=with_values,
                    with_optimizer=with_optimizer,
                )
            except BaseException:
                self._log.discard()
                raise
            self._log.seal(delta, commit=commit)
            return delta

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
        return read_rows(self._shard(fqn), ids)

    def column_views(self, fqn: str) -> list[Tensor]:
        """Live views ``[R, columns]`` of this rank's rows, one for each range in ``shards[fqn].columns``.

        Training writes to them; copy before the next batch what must stay.

        Raises:
            InvalidArgumentError: for a table that is not tracked.
        """
        return column_views(self._shard(fqn))

    # Attaching

    def reattach(self) -> None:
        """Watch the model's present modules and shards, after TorchRec resharded it; with no backward still to come.

        A table whose block and lookup module on this rank are as they were keeps its log. Of any other one, and of all
        after :meth:`detach`, all rows held now count as changed, for every consumer: nobody watched them meanwhile.

        Raises: as the constructor; the tracker is then as it was.
        """
        found = self._discover()
        held = self._shards
        moved = [fqn for fqn, shard in found.shards.items() if fqn not in held or shard.spec != held[fqn].spec]
        unseen = [
            fqn
            for fqn, shard in found.shards.items()
            if fqn not in moved
            and (shard.is_fused or self._records_lookups)
            and not (self._is_attached and _modules(shard) == _modules(held[fqn]))
        ]
        self._remove_hooks()
        self._found = found
        self._shards.update(found.shards)
        self._log.replace({fqn: self._make_store(fqn) for fqn in moved})
        for fqn in unseen:
            self._log.mark(fqn, None, is_written=True)
        self._hooks = self._attach()

    def detach(self) -> None:
        """Remove every hook; afterwards reads raise :class:`DetachedError`. Calling it again does nothing."""
        MEMORY.give_back()
        self._remove_hooks()
        self._is_attached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _discover(self) -> Discovery:
        """The model's tables as they are sharded now, all of which can be followed."""
        found = discover(self._model, self._skips)
        refuse_unseen_writes(self._model, found)
        for shard in found.shards.values():
            self._capture.check(shard)
        return found

    def _attach(self) -> list[Watcher]:
        self._is_attached = True
        lookups = self._records_lookups
        return [
            *(KernelHook(kernel, self._log, self._keys, lookups=lookups) for kernel in self._found.kernels),
            *watch_writes(self._model, self._found, self._log, self._keys),
        ]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._num_past_errors, self._hooks = self.num_hook_errors, []

    def _make_store(self, fqn: str) -> SegmentStore:
        return make_store(fqn, self._shards, self._capture, engine=self._engine)

    def _shard(self, fqn: str) -> LocalShard:
        if fqn not in self._shards:
            raise InvalidArgumentError("fqn", fqn, f"Pass one of the tracked tables {sorted(self._shards)}")
        return self._shards[fqn]


def _modules(shard: LocalShard) -> list[tuple[object, int]]:
    return [(kernel.module, slot) for kernel, slot in shard.places]
