"""Names of TorchRec's own tracker, so that its users need to change only one import.

Replace ``from torchrec.distributed.model_tracker...`` by ``from delta_tracker.compat``. The classes do what TorchRec's
do, with these differences:

- A row counts as changed when its update is written, not when it is looked up. Pass ``record="lookups"`` to
  :class:`ModelDeltaTrackerTrec` for the latter.
- ``top_percentage`` selects the rows with the largest changes in each table, and the others stay pending; TorchRec
  ignores it.
- Old values in ``EMBEDDING`` mode and the states of several tables are exact: ``benchmarks/faults`` has the cases in
  which TorchRec's are not. A read without changed rows returns an empty dict; in TorchRec, it raises an error.

There is no ``RawIdTracker``: deltas have the raw ids of tables with managed collisions.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker import tracker as own
from delta_tracker.tracker.store.lookups import DeltaStore
from delta_tracker.tracker.top_k import TopK
from delta_tracker.types import Delta, EmbdUpdateMode, IndexedLookup, TrackingMode

UpdateMode = EmbdUpdateMode

__all__ = [
    "DeltaStore",
    "DeltaTrackerConfig",
    "IndexedLookup",
    "ModelDeltaTracker",
    "ModelDeltaTrackerTrec",
    "TrackingMode",
    "UniqueRows",
    "UpdateMode",
    "init_torchrec_delta_tracker",
]


def __getattr__(name: str) -> object:
    """Return ``SUPPORTED_MODULES``, TorchRec's classes that can be tracked. The access imports TorchRec."""
    return getattr(own, name)


@dataclass
class UniqueRows:
    """Changed rows of one table on this rank.

    Args:
        ids: ``[N]`` int64, local to the shard, ascending and unique.
        states: ``[N, ...]`` states of the rows, see :class:`~delta_tracker.types.TrackingMode`; None in ``ID_ONLY``.
    """

    ids: Tensor
    states: Tensor | None


@dataclass
class DeltaTrackerConfig:
    """Arguments of a tracker.

    Args:
        tracking_mode: the data that is kept for each changed row.
        consumers: names of the independent readers; None for one named ``"default"``.
        delete_on_read: drop rows once every consumer has read them.
        auto_compact: compact while TorchRec distributes its output.
        fqns_to_skip: tables not to track.
    """

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: Sequence[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: Sequence[str] = field(default_factory=list)


class ModelDeltaTrackerTrec(own.ModelDeltaTracker):
    """:class:`~delta_tracker.ModelDeltaTracker` with the methods of TorchRec's tracker of the same name.

    The arguments are those of :class:`~delta_tracker.ModelDeltaTracker`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16))
        >>> ModelDeltaTrackerTrec(model, mode=TrackingMode.EMBEDDING).get_unique_ids()
        {}
    """

    def get_unique(
        self,
        consumer: str | None = None,
        top_percentage: float | None = 1.0,
        per_table_percentage: Mapping[str, tuple[float, str]] | None = None,
        sorted_by_indices: bool | None = True,  # noqa: FBT001, FBT002  TorchRec's signature
    ) -> dict[str, UniqueRows]:
        """Return the rows that changed since the consumer's last read, by table FQN, and move its cursor.

        Args:
            consumer: name of the reader; None for ``"default"``.
            top_percentage: fraction of the changed rows of each table to return, those with the largest changes; 1 or
                None for all. A smaller one needs a mode with states, and is a collective.
            per_table_percentage: not supported: call ``get_delta(top_k=...)``.
            sorted_by_indices: ids are always ascending.

        Raises:
            InvalidArgumentError: if ``per_table_percentage`` is given, or ``top_percentage`` is not in ``(0, 1]``.
            NeedsSnapshotError: if the consumer was dropped, see :meth:`~delta_tracker.ModelDeltaTracker.get_delta`.
        """
        del sorted_by_indices
        if per_table_percentage is not None:
            text = "Call get_delta(top_k=TopK(...)) for budgets that differ between tables"
            raise InvalidArgumentError("per_table_percentage", dict(per_table_percentage), text)
        top_k = None if top_percentage in (None, 1) else TopK(fraction=top_percentage, per_table=True)
        return self._reader.read(self._log.consumers.resolve(consumer), _unique, top_k=top_k)

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Return the ids of :meth:`get_unique`, ``[N]`` int64 by table FQN, and move the consumer's cursor."""
        return self._reader.read(
            self._log.consumers.resolve(consumer), lambda delta: {fqn: rows.ids for fqn, rows in _unique(delta).items()}
        )


def _unique(delta: Delta) -> dict[str, UniqueRows]:
    return {fqn: UniqueRows(rows.ids, rows.states) for fqn, rows in delta.items() if len(rows.ids)}


ModelDeltaTracker = ModelDeltaTrackerTrec


def init_torchrec_delta_tracker(model: nn.Module, delta_tracker_config: DeltaTrackerConfig) -> ModelDeltaTrackerTrec:
    """Return a tracker of a model, as ``DistributedModelParallel.init_torchrec_delta_tracker`` does.

    Args:
        model: a ``DistributedModelParallel``, or another model, see :class:`~delta_tracker.ModelDeltaTracker`.
        delta_tracker_config: the tracker's arguments, by TorchRec's names.

    Raises InvalidArgumentError if the second argument is not a :class:`DeltaTrackerConfig`, and the errors of
    :class:`~delta_tracker.ModelDeltaTracker`.
    """
    if not all(hasattr(delta_tracker_config, each.name) for each in fields(DeltaTrackerConfig)):
        remedy = "Pass the model first, and then a DeltaTrackerConfig(consumers=[...])"
        raise InvalidArgumentError("delta_tracker_config", delta_tracker_config, remedy)
    return ModelDeltaTrackerTrec(
        model,
        delta_tracker_config.consumers,
        delta_tracker_config.delete_on_read,
        delta_tracker_config.auto_compact,
        delta_tracker_config.tracking_mode,
        delta_tracker_config.fqns_to_skip,
    )
