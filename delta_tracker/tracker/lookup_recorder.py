"""Methods that record lookups explicitly. They have the same names as the methods of TorchRec's tracker."""

from __future__ import annotations

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import first_per_id
from delta_tracker.sharding.kernel_hooks import KeyedIds
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import TrackingMode


class LookupRecorder:
    """Recorder of lookups that no hook records. A model whose lookups are all recorded by hooks does not need it.

    Args:
        log: the change log in which the lookups are recorded.
        model: the tracked model, which maps features to tables.
        mode: tracking mode. Old values can be recorded only in EMBEDDING mode.
    """

    def __init__(self, log: ChangeLog, model: TrackedModel, mode: TrackingMode) -> None:
        self._log = log
        self._model = model
        self._mode = mode

    def record_ids(self, kjt: KeyedIds) -> None:
        """Mark the rows of a lookup as changed.

        Args:
            kjt: a KeyedJaggedTensor of local ids. A feature's ids are marked in every table in which the
                feature is looked up.
        """
        self._record(kjt, None)

    def record_embeddings(self, kjt: KeyedIds, embeddings: Tensor) -> None:
        """Mark the rows of a lookup as changed, and record their values from before the change.

        Args:
            kjt: a KeyedJaggedTensor of local ids.
            embeddings: the old values, in the order of ``kjt.values()``, in any shape with one row per id.

        Raises:
            InvalidArgumentError: if the mode is not EMBEDDING, or the number or width of the rows is wrong.
        """
        num_ids = kjt.values().numel()
        if self._mode is not TrackingMode.EMBEDDING:
            raise InvalidArgumentError("mode", self._mode, "Track in EMBEDDING mode to record embeddings")
        if embeddings.numel() and (num_ids == 0 or embeddings.numel() % num_ids):
            raise InvalidArgumentError("embeddings", tuple(embeddings.shape), f"Pass one row for each of {num_ids} ids")
        if num_ids:
            self._record(kjt, embeddings.detach().reshape(num_ids, -1))

    def record_lookup(self, kjt: KeyedIds, states: Tensor) -> None:
        """Call :meth:`record_embeddings` in EMBEDDING mode and :meth:`record_ids` in the other modes.

        Args:
            kjt: a KeyedJaggedTensor of local ids.
            states: old values of the rows, as for :meth:`record_embeddings`; ignored in the other modes.

        Raises:
            InvalidArgumentError: if the number or width of the rows is wrong in EMBEDDING mode.
        """
        if self._mode is TrackingMode.EMBEDDING:
            self.record_embeddings(kjt, states)
        else:
            self.record_ids(kjt)

    def _record(self, kjt: KeyedIds, states: Tensor | None) -> None:
        found = self._model.found
        begin = 0
        looked_up = []
        for feature, length in zip(kjt.keys(), kjt.length_per_key(), strict=True):
            rows = slice(begin, begin + length)
            begin += length
            for fqn, features in found.features.items():
                spec = found.shards[fqn].spec
                if feature in features and spec.num_rows:
                    ids = kjt.values()[rows].long()
                    if states is not None and states.shape[1] != spec.num_columns:
                        remedy = f"Pass rows of {spec.num_columns} columns for {fqn!r}"
                        raise InvalidArgumentError("embeddings", tuple(states.shape), remedy)
                    looked_up.append((fqn, ids, None if states is None else states[rows]))
        for fqn, ids, old in looked_up:  # all are valid
            first = (ids, None) if old is None else first_per_id(ids, old)
            self._log.writes.mark(fqn, first[0], states=first[1])
