"""Replacement for TorchRec's own tracker, with the same interface.

Replace ``from torchrec.distributed.model_tracker...``, including its submodules, with ``from delta_tracker.compat``. If
the program calls ``init_torchrec_delta_tracker`` of ``DistributedModelParallel``, call :func:`patch_torchrec` first.
The classes behave like TorchRec's, with these differences:

- A row counts as changed when its update is written, not when it is looked up. To record lookups instead, pass
  ``record="lookups"`` to :class:`ModelDeltaTrackerTrec`.
- ``top_percentage`` selects the rows with the largest changes in each table. The other rows stay pending. TorchRec
  ignores the argument.
- Old values in ``EMBEDDING`` mode and the states of several tables are exact. ``benchmarks/faults`` lists cases in
  which TorchRec returns wrong values. ``EMBEDDING`` mode supports ``EmbeddingBagCollection``, which TorchRec rejects.
- A read returns every tracked table, with empty ids for an unchanged table. TorchRec omits a table before its first
  lookup and after ``clear()``, and raises an error if nothing was looked up since the last read.
- An invalid argument raises :class:`TorchrecAssertionError`. TorchRec uses ``assert`` statements.

This module has no ``RawIdTracker``, because deltas contain the raw ids of tables with managed collisions. With a
``RawIdTrackerConfig``, ``DistributedModelParallel`` creates TorchRec's ``RawIdTracker``. The hooks ``record_momentum``
and ``record_rowwise_optim_state`` are missing, because momentum modes read the optimizer's states directly.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True))
    >>> tracker = init_torchrec_delta_tracker(model, DeltaTrackerConfig(consumers=["serving"]))
    >>> model(torch.tensor([[7, 42, 7]])).sum().backward()
    >>> torch.optim.SGD(model.parameters(), lr=0.1).step()
    >>> tracker.step()
    >>> tracker.get_unique("serving")["0"].ids.tolist()
    [7, 42]
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.dmp_patch import TorchrecPatch
from delta_tracker.sharding.kernel_hooks import KeyedIds
from delta_tracker.tracker import tracker as own
from delta_tracker.tracker.store import lookups
from delta_tracker.tracker.top_k import TopK
from delta_tracker.types import Delta, EmbdUpdateMode, TrackingMode

UpdateMode = EmbdUpdateMode

__all__ = [
    "DeltaStore",
    "DeltaStoreTrec",
    "DeltaTrackerConfig",
    "IndexedLookup",
    "ModelDeltaTracker",
    "ModelDeltaTrackerTrec",
    "ModelTrackerConfigs",
    "RawIdTrackerConfig",
    "TorchrecAssertionError",
    "TorchrecPatch",
    "Trackers",
    "TrackingMode",
    "UniqueRows",
    "UpdateMode",
    "init_torchrec_delta_tracker",
    "patch_torchrec",
]


def __getattr__(name: str) -> object:
    """Return ``UPDATE_MODE_MAP`` or ``SUPPORTED_MODULES``, as in TorchRec. Accessing the latter imports TorchRec."""
    return getattr(own, name)


class TorchrecAssertionError(InvalidArgumentError, AssertionError):
    """An argument is invalid. The class is also an ``AssertionError``, which programs for TorchRec may catch."""


@contextmanager
def _assertions() -> Iterator[None]:
    try:
        yield
    except InvalidArgumentError as error:
        raise TorchrecAssertionError(error.argument, error.value, error.remedy) from None


# Types


class Trackers(Enum):
    """Kind of tracker. The member names are the keys of ``DistributedModelParallel.model_trackers``."""

    DELTA_TRACKER = "delta_tracker"
    RAW_ID_TRACKER = "raw_id_tracker"


@dataclass
class IndexedLookup:
    """Recorded lookup of one batch in one table, returned by :meth:`DeltaStoreTrec.get_indexed_lookups`.

    Args:
        batch_idx: index of the batch.
        ids: ``[N]`` ids, in any order, duplicates allowed.
        states: ``[N, ...]`` recorded states; None if only ids are recorded.
        compact: ignored, as in TorchRec.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None
    compact: bool = False


@dataclass
class UniqueRows:
    """Ids and states of the changed rows of one table on this rank.

    Args:
        ids: ``[N]`` int64, local to the shard, ascending and unique.
        states: ``[N, ...]`` states of the rows, see :class:`~delta_tracker.types.TrackingMode`; None in ``ID_ONLY``.
    """

    ids: Tensor
    states: Tensor | None


@dataclass
class DeltaTrackerConfig:
    """Configuration of a tracker. Pass it to :func:`init_torchrec_delta_tracker`.

    Args:
        tracking_mode: kind of state that a read returns for each changed row.
        consumers: names of the consumers; None for one consumer named ``"default"``.
        delete_on_read: True to drop rows once every consumer has read them.
        auto_compact: True to compact the change log during TorchRec's output distribution, instead of after each read.
        fqns_to_skip: FQNs of the tables that are not tracked.
    """

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: Sequence[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: Sequence[str] = field(default_factory=list)


@dataclass
class RawIdTrackerConfig:
    """Configuration of TorchRec's own ``RawIdTracker``, which ``DistributedModelParallel`` creates.

    Args:
        delete_on_read: True to drop ids once every consumer has read them.
        fqns_to_skip: FQNs of the tables that are not tracked.
    """

    delete_on_read: bool = True
    fqns_to_skip: Sequence[str] = field(default_factory=list)


@dataclass
class ModelTrackerConfigs:
    """Value of the argument ``model_tracker_configs`` of ``DistributedModelParallel``.

    Args:
        raw_id_tracker_config: configuration of the ``RawIdTracker`` to create; None to create no ``RawIdTracker``.
    """

    raw_id_tracker_config: RawIdTrackerConfig | None = None


# Stores


class _RawLookups(lookups.DeltaStore):
    """Store that accepts states in mode NONE, as TorchRec's store does. The unique rows do not contain these states."""

    def _check_mode(self, states: Tensor | None) -> None:
        if self._mode is not UpdateMode.NONE:
            super()._check_mode(states)


class DeltaStoreTrec:
    """Store of recorded lookups: a :class:`~delta_tracker.DeltaStore` with TorchRec's interface.

    Args:
        updateMode: state that reads return for each id: no state, the first state or the last state.

    Example:
        >>> store = DeltaStoreTrec(updateMode=UpdateMode.LAST)
        >>> store.append(batch_idx=0, fqn="user", ids=torch.tensor([7, 3, 7]), states=torch.tensor([0.7, 0.3, 1.7]))
        >>> store.get_unique()["user"]
        UniqueRows(ids=tensor([3, 7]), states=tensor([0.3000, 1.7000]))
    """

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:  # noqa: N803  TorchRec's name
        self.updateMode = updateMode
        self._store = _RawLookups(updateMode)

    @property
    def per_fqn_lookups(self) -> dict[str, list[IndexedLookup]]:
        """Stored lookups of each table, by FQN. Do not modify the tensors: the store shares them."""
        return self.get_indexed_lookups(-(1 << 63), 1 << 63)

    def append(
        self,
        batch_idx: int,
        fqn: str,
        ids: Tensor,
        states: Tensor | None = None,
        raw_ids: Tensor | None = None,
        runtime_meta: Tensor | None = None,
    ) -> None:
        """Append a copy of one lookup; see ``DeltaStore.append``. ``raw_ids`` and ``runtime_meta`` are ignored."""
        del raw_ids, runtime_meta
        with _assertions():
            self._store.append(batch_idx, fqn, ids, states)

    def delete(self, up_to_idx: int | None = None) -> None:
        """Delete the lookups of all batches before ``up_to_idx``. If it is None, delete all lookups and tables."""
        self._store.delete(up_to_idx)

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merge each table's lookups of batches in ``[start_idx, end_idx)`` into one lookup of batch ``start_idx``."""
        with _assertions():
            self._store.compact(start_idx, end_idx)

    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Return the sorted unique ids in lookups of batch ``from_idx`` and later, with their states, by table FQN."""
        return {fqn: UniqueRows(rows.ids, rows.states) for fqn, rows in self._store.get_delta(from_idx).items()}

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Return the stored lookups of batches in ``[start_idx, end_idx)`` by table FQN."""
        found = self._store.get_indexed_lookups(start_idx, end_idx)
        return {
            fqn: [IndexedLookup(each.batch_idx, each.ids, each.states) for each in held] for fqn, held in found.items()
        }


DeltaStore = DeltaStoreTrec


def _compute_unique_rows(ids: Sequence[Tensor], states: Sequence[Tensor] | None, mode: UpdateMode) -> UniqueRows:
    """Return the unique ids of several lookups, with their states. TorchRec's tests call a function of this name."""
    store = lookups.DeltaStore(mode)
    with _assertions():
        for index, each in enumerate(ids):
            store.append(index, "", each, None if states is None else states[index])
    (rows,) = store.get_delta().values()
    return UniqueRows(rows.ids, rows.states)


# Trackers


class ModelDeltaTrackerTrec(
    own.ModelDeltaTracker,
    remedy="Save or copy its state_dict(). To copy a DistributedModelParallel, take it out of model_trackers meanwhile",
):
    """:class:`~delta_tracker.ModelDeltaTracker` with the methods of TorchRec's tracker of the same name.

    The arguments are those of :class:`~delta_tracker.ModelDeltaTracker`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16))
        >>> ModelDeltaTrackerTrec(model, mode=TrackingMode.EMBEDDING).get_unique_ids()
        {'0': tensor([], dtype=torch.int64)}
    """

    def get_unique(
        self,
        consumer: str | None = None,
        top_percentage: float | None = 1.0,
        per_table_percentage: Mapping[str, tuple[float, str]] | None = None,
        sorted_by_indices: bool | None = True,  # noqa: FBT001, FBT002  TorchRec's signature
    ) -> dict[str, UniqueRows]:
        """Return the rows that changed since the consumer's last read, by table FQN. Advance the consumer's cursor.

        Args:
            consumer: name of the consumer; None for ``"default"``.
            top_percentage: fraction of each table's changed rows to return; 1 or None for all rows. A fraction below 1
                selects the rows with the largest changes, requires a mode with states, and makes the call a collective.
            per_table_percentage: not supported; call ``get_delta(top_k=...)`` instead.
            sorted_by_indices: ignored; ids are always ascending.

        Raises:
            TorchrecAssertionError: if the consumer does not exist, ``per_table_percentage`` is given, or
                ``top_percentage`` is not in ``(0, 1]``.
            NeedsSnapshotError: if pending rows were dropped; see :meth:`~delta_tracker.ModelDeltaTracker.get_delta`.
        """
        del sorted_by_indices
        with _assertions():
            if per_table_percentage is not None:
                text = "Call get_delta(top_k=TopK(...)) for budgets that differ between tables"
                raise InvalidArgumentError("per_table_percentage", dict(per_table_percentage), text)
            top_k = None if top_percentage in (None, 1) else TopK(fraction=top_percentage, per_table=True)
            self._hooks.check_read()
            return self._reader.read(self._log.consumers.resolve(consumer), _unique, top_k=top_k)

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Return the ids of the rows that :meth:`get_unique` returns, by table FQN. Advance the consumer's cursor."""
        with _assertions():
            self._hooks.check_read()
            return self._reader.read(self._log.consumers.resolve(consumer), _ids)

    def clear(self, consumer: str | None = None) -> None:
        """Discard the pending rows of one consumer, or of all consumers if ``consumer`` is None."""
        with _assertions():
            super().clear(consumer)

    def record_lookup(
        self, kjt: KeyedIds, states: Tensor, emb_module: nn.Module | None = None, raw_ids: Tensor | None = None
    ) -> None:
        """Record a lookup; see :meth:`~delta_tracker.ModelDeltaTracker.record_lookup`.

        ``emb_module`` and ``raw_ids`` are ignored.
        """
        del emb_module, raw_ids
        with _assertions():
            super().record_lookup(kjt, states)

    @property
    def table_to_fqn(self) -> dict[str, str]:
        """Mapping from table name to FQN. If several tables have the same name, it contains the FQN of the last one."""
        return {fqn.rpartition(".")[2]: fqn for fqn in self.tables}

    def get_latest(self) -> dict[str, Tensor]:
        """Return the first optimizer state of each table that this rank trains with a fused optimizer, by table FQN.

        Returns:
            Views of the states of this rank's ``R`` rows: ``[R]`` for a state with one number per row, such as the sum
            of row-wise Adagrad, otherwise ``[R, D]``. Training changes the views. For a table with ``S > 1`` column
            ranges on this rank, the value is a copy, ``[R, S]`` or ``[R, D]``. Tables without optimizer states are
            omitted.
        """
        found = {}
        for fqn, table in self.live.table_states.items():
            if table.states:
                views = [states[0] for states in self.live.state_views(fqn)]
                if len(views) > 1:
                    found[fqn] = torch.cat(views, dim=1)
                else:
                    found[fqn] = views[0].squeeze(1) if table.states[0].width == "range" else views[0]
        return found


def _unique(delta: Delta) -> dict[str, UniqueRows]:
    return {fqn: UniqueRows(rows.ids, rows.states) for fqn, rows in delta.items()}


def _ids(delta: Delta) -> dict[str, Tensor]:
    return {fqn: rows.ids for fqn, rows in delta.items()}


ModelDeltaTracker = ModelDeltaTrackerTrec


def init_torchrec_delta_tracker(model: nn.Module, delta_tracker_config: DeltaTrackerConfig) -> ModelDeltaTrackerTrec:
    """Create and return a tracker of ``model`` with the given configuration.

    Unlike TorchRec's method of the same name, this function does not register the tracker with the model. Call the
    tracker's ``step()`` after each batch.

    Args:
        model: a ``DistributedModelParallel``, or another model that :class:`~delta_tracker.ModelDeltaTracker` supports.
        delta_tracker_config: a :class:`DeltaTrackerConfig` of this module or of TorchRec.

    Raises InvalidArgumentError if ``delta_tracker_config`` is of another type, and the errors of
    :class:`~delta_tracker.ModelDeltaTracker`.
    """
    if not all(hasattr(delta_tracker_config, each.name) for each in fields(DeltaTrackerConfig)):
        remedy = "Pass the model first, and then a DeltaTrackerConfig(consumers=[...])"
        raise InvalidArgumentError("delta_tracker_config", delta_tracker_config, remedy)
    mode = delta_tracker_config.tracking_mode
    return ModelDeltaTrackerTrec(
        model,
        delta_tracker_config.consumers,
        delta_tracker_config.delete_on_read,
        delta_tracker_config.auto_compact,
        getattr(mode, "name", mode),  # TorchRec's enum has the same names
        delta_tracker_config.fqns_to_skip,
    )


def patch_torchrec() -> TorchrecPatch:
    """Patch TorchRec's ``DistributedModelParallel`` in this process to use trackers of this module.

    Call this function once, before ``DistributedModelParallel.init_torchrec_delta_tracker(config)``. That method then
    creates a :class:`ModelDeltaTrackerTrec`, and ``get_delta_tracker()`` returns it. To undo the patch, call
    ``remove()`` of the returned object, or use the object in a ``with`` block.

    ``DistributedModelParallel.forward`` calls the tracker's ``step()`` at the start of each forward pass, even during
    evaluation. If the program also calls ``step()``, each batch counts twice. No row is lost or returned twice, but
    ``curr_batch_idx``, a publisher's cadence in batches and the ``max_age`` of top-k advance by 2 for each batch, and a
    publisher rejects the data position that was passed to ``attach_data``.

    If a publisher has ``recovery=``, the program must call the tracker's ``step()`` after the update and before the
    publisher's ``step()``. Create the publisher's tracker with the function :func:`init_torchrec_delta_tracker`, so
    that only the program calls the tracker's ``step()``.

    Example:
        >>> patch_torchrec().remove()
    """
    return TorchrecPatch(init_torchrec_delta_tracker)
