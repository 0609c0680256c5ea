"""ModelDeltaTracker, the one object that a trainer meets."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

from torch import Tensor, nn

from delta_tracker.cursors import Cursors
from delta_tracker.errors import DetachedError, InvalidArgumentError
from delta_tracker.sharding.discover import LocalShard, discover
from delta_tracker.sharding.hooks import KernelHook
from delta_tracker.sharding.weights import column_views, read_rows
from delta_tracker.store.segments import SegmentStore
from delta_tracker.types import Delta, DeltaRows, ShardSpec, TableSpec, TrackingMode

_logger = logging.getLogger(__name__)


class ModelDeltaTracker:
    """Keeps which rows of a model's sharded embedding tables changed, for any number of consumers.

    A row counts as changed when an update of it is written, not when it is looked up: passes under ``no_grad`` and
    outputs that are never backpropagated leave no trace. A read may happen at any moment between two operations of
    the training thread; nothing is lost by it. Every rank tracks its own shards, without any collective.

    Call order on each rank: build it after the model is sharded; train; call :meth:`step` once per batch; read with
    :meth:`get_delta` whenever a consumer wants to.

    Args:
        model: a ``DistributedModelParallel``, or any module that contains sharded EmbeddingCollections or
            EmbeddingBagCollections with fused kernels.
        consumers: names of the independent readers; one named ``"default"`` if not given.
        delete_on_read: forget rows once every consumer has committed a read of them. False keeps them all, so that
            :meth:`rewind` can take a consumer back to the start; it costs at most one byte a row more.
        auto_compact: merge the log at every :meth:`step`; otherwise only when a consumer reads or commits.
        mode: what is kept of a changed row.
        fqns_to_skip: tables to leave alone, each by its FQN, the FQN of a module above it, or one component of it.

    Raises:
        NoShardedModuleError: if the model has nothing to track.
        UnsupportedTableError: if a table's kernel cannot be followed.
        InvalidArgumentError: for consumers that are not different names, or an unknown mode.
        MissingExtraError: if torchrec is not installed.
    """

    DEFAULT_CONSUMER = "default"

    def __init__(
        self,
        model: nn.Module,
        consumers: Sequence[str] | None = None,
        delete_on_read: bool = True,  # noqa: FBT001, FBT002  positional as in the seed interface
        auto_compact: bool = False,  # noqa: FBT001, FBT002
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
    ) -> None:
        if not isinstance(mode, TrackingMode):
            raise InvalidArgumentError("mode", mode, f"Pass one of {[str(known) for known in TrackingMode]}")
        self._cursors = Cursors([self.DEFAULT_CONSUMER] if consumers is None else consumers)
        self._delete_on_read = delete_on_read
        self._auto_compact = auto_compact
        skips = _as_names(fqns_to_skip)
        self._found = discover(model, skips)
        _warn_unknown(skips, [*self._found.tables, *self._found.skipped])
        self._stores = {
            fqn: SegmentStore(shard.spec.num_rows, shard.device) for fqn, shard in self._found.shards.items()
        }
        self._lock = threading.RLock()
        self._position = 0
        self._num_batches = 0
        keys = itertools.count()
        self._hooks = [KernelHook(kernel, self, keys) for kernel in self._found.kernels]
        self._attached = True

    # What is tracked

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """FQN to table, the same on every rank."""
        return MappingProxyType(self._found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """FQN to the block that this rank holds, with no rows where it holds none."""
        return {fqn: shard.spec for fqn, shard in self._found.shards.items()}

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return self._cursors.names

    @property
    def num_batches(self) -> int:
        """How often :meth:`step` was called."""
        return self._num_batches

    @property
    def num_hook_errors(self) -> int:
        """Faults inside hooks since the start; each was contained and made its tables count as wholly changed."""
        return sum(hook.num_errors for hook in self._hooks)

    def resolve_consumer(self, consumer: str | None) -> str:
        """The name of ``consumer``; None means the only one.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
        """
        return self._cursors.resolve(consumer)

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """FQN to sharded embedding module."""
        return dict(self._found.modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Table FQN to the names of the features that are looked up in it."""
        return {fqn: list(names) for fqn, names in self._found.features.items()}

    # Training

    def step(self) -> None:
        """Count one batch. It orders the log for people; no update is lost if nobody calls it."""
        self._num_batches += 1
        if self._auto_compact:
            self.compact()

    def opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Take note that rows are about to be written; for :mod:`delta_tracker.sharding.hooks`."""
        with self._lock:
            for fqn, table_ids in ids.items():
                self._stores[fqn].open_batch(key, table_ids)

    def applied(self, key: int, tables: Iterable[str]) -> None:
        """Take note that the rows opened under ``key`` are written; for :mod:`delta_tracker.sharding.hooks`."""
        with self._lock:
            for fqn in tables:
                self._stores[fqn].close_batch(key)

    # Reading

    def get_delta(self, consumer: str | None = None, *, commit: bool = True, with_values: bool = False) -> Delta:
        """The rows that changed since the consumer's last committed read.

        Args:
            consumer: who reads; may be left out when there is only one.
            commit: move the cursor now. With False it stays until :meth:`commit`, and the rows stay pending; a new
                read replaces the uncommitted one and covers its rows too.
            with_values: add ``values``, the rows as they are now, ``[N, D]`` in the table's dtype.

        Returns:
            Table FQN to rows; a table without changes is present and empty. Rows whose update is under way at the
            read are in it and will be in the next one too.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            DetachedError: after :meth:`detach`.
        """
        with self._lock:
            name = self._cursors.resolve(consumer)
            self._require_attached()
            start, first_batch = self._cursors.start(name)
            self._position += 1
            for store in self._stores.values():
                store.cut(self._position)
            rows = {fqn: self._read_table(fqn, start, with_values=with_values) for fqn in self._found.tables}
            batches = (first_batch, self._num_batches)
            delta = Delta(rows, consumer=name, start=start, stop=self._position, batches=batches)
            self._cursors.seal(delta)
            if commit:
                self._cursors.commit(delta)
            self.compact()
            return delta

    def get_delta_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Table FQN to ``[N]`` int64 local ids of :meth:`get_delta`, which this call is otherwise the same as."""
        return {fqn: rows.ids for fqn, rows in self.get_delta(consumer).items()}

    def commit(self, delta: Delta) -> None:
        """Move the consumer's cursor past an uncommitted read.

        Raises:
            StaleDeltaError: if ``delta`` is not the consumer's uncommitted read any more.
        """
        with self._lock:
            self._cursors.commit(delta)
            self.compact()

    def abort(self, delta: Delta) -> None:
        """Forget an uncommitted read; its rows stay pending.

        Raises:
            StaleDeltaError: if ``delta`` is not the consumer's uncommitted read any more.
        """
        with self._lock:
            self._cursors.abort(delta)
            self.compact()

    def rewind(self, consumer: str | None = None) -> None:
        """Let a consumer read again everything that changed since the tracker was built; aborts its open read.

        Raises:
            UnknownConsumerError: if there is no such consumer, or several and none was named.
            InvalidArgumentError: if the tracker forgets what was read (``delete_on_read=True``).
        """
        with self._lock:
            name = self._cursors.resolve(consumer)
            if self._delete_on_read:
                raise InvalidArgumentError("delete_on_read", True, "Build the tracker with delete_on_read=False")
            self._cursors.rewind(name)

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

    def compact(self) -> None:
        """Drop what every consumer has committed and merge what no cursor tells apart."""
        with self._lock:
            pinned = self._cursors.pinned
            for store in self._stores.values():
                store.compact(pinned)
                if self._delete_on_read:
                    store.delete(self._cursors.oldest)

    # End

    def detach(self) -> None:
        """Remove every hook; afterwards reads raise :class:`DetachedError`. Calling it again does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._attached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _read_table(self, fqn: str, start: int, *, with_values: bool) -> DeltaRows:
        shard = self._found.shards[fqn]
        ids = self._stores[fqn].changed(start, self._position)
        values = read_rows(shard, ids) if with_values else None
        return DeltaRows(ids, values=values, shard=shard.spec)

    def _shard(self, fqn: str) -> LocalShard:
        if fqn not in self._found.shards:
            raise InvalidArgumentError("fqn", fqn, f"Pass one of the tracked tables {sorted(self._found.shards)}")
        return self._found.shards[fqn]

    def _require_attached(self) -> None:
        if not self._attached:
            raise DetachedError


def _as_names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidArgumentError("fqns_to_skip", names, "Pass a list of names")
    return tuple(names)


def _warn_unknown(skips: Iterable[str], known: Sequence[str]) -> None:
    for skip in skips:
        if not any(fqn == skip or fqn.startswith(f"{skip}.") or skip in fqn.split(".") for fqn in known):
            warnings.warn(f"fqns_to_skip names {skip!r}, which no table has; tables: {sorted(known)}", stacklevel=3)
