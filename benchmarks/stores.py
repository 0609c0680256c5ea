"""Common interface to this library's change log and TorchRec's store: record lookups, and read and clear the changes.

Shapes: ``N`` ids, ``D`` columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker.rows import take_rows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import DeltaRows

_READER = "reader"

Found = dict[str, tuple[Tensor, Tensor | None]]
"""Table to ids ``[N]`` and, in EMBEDDING mode, the rows ``[N, D]`` before their first change."""


class Store(Protocol):
    """Interface of a store in the benchmarks."""

    def record(self, features: KeyedJaggedTensor, rows: Tensor | None = None) -> None:
        """Record one batch.

        Args:
            features: the looked-up ids, one feature per table, with the table's name.
            rows: in EMBEDDING mode ``[N, D]``, the rows that the lookup returned for the ids of all features.
        """

    def read(self) -> Found:
        """Return and clear the changes since the last read."""


class Ours:
    """A tracker's change log, driven like by its hooks and reads.

    Args:
        num_rows: table to number of rows.
        engine: kernels of the store, see :class:`~delta_tracker.tracker.store.segments.SegmentStore`.
        weights: table to its live rows, ``[R, D]``, for EMBEDDING mode.
        device: device of the ids.
    """

    def __init__(
        self,
        num_rows: Mapping[str, int],
        engine: str | None = None,
        weights: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        stores = {
            name: SegmentStore(
                count,
                device,
                engine=engine,
                old_states=None if weights is None else lambda ids, name=name: take_rows(weights[name], ids),  # type: ignore[misc]
            )
            for name, count in num_rows.items()
        }
        self.log = ChangeLog(stores, [_READER], delete_on_read=True, max_bytes=None)
        self._keys = itertools.count()

    def record(self, features: KeyedJaggedTensor, rows: Tensor | None = None) -> None:
        """Record one batch. Old rows are copied from the table, not from ``rows``."""
        del rows
        ids = dict(zip(features.keys(), features.values().split_with_sizes(features.length_per_key()), strict=True))
        key = next(self._keys)
        self.log.writes.begin_write(key, ids)
        self.log.writes.end_write(key, ids)
        self.log.consumers.step()

    def read(self, reader: str = _READER, *, commit: bool = True) -> Found:
        """Cut, read, commit if ``commit``, and compact."""
        reading = self.log.consumers.read(reader)
        rows = {
            name: DeltaRows(changed.ids, changed.states, known=changed.known) for name, changed in reading.rows.items()
        }
        reading.returns(rows)
        self.log.consumers.commit(reading) if commit else self.log.consumers.hold(reading)
        return {name: (changed.ids, changed.states) for name, changed in rows.items()}


class Theirs:
    """TorchRec's tracker without a model, driven like by its hooks, with its own batches, compaction and reads.

    Args:
        tables: names of the tables.
        auto_compact: compact at every batch, as the tracker does during the output distribution.
        is_embedding: use EMBEDDING mode.
    """

    def __init__(self, tables: Iterable[str], *, auto_compact: bool = False, is_embedding: bool = False) -> None:
        mode = TrackingMode.EMBEDDING if is_embedding else TrackingMode.ID_ONLY
        self._tracker = ModelDeltaTrackerTrec(_NoModel(), auto_compact=auto_compact, mode=mode)
        self._tracker.feature_to_fqn = {name: name for name in tables}
        self._auto_compact = auto_compact

    def record(self, features: KeyedJaggedTensor, rows: Tensor | None = None) -> None:
        """Record one batch."""
        self._tracker.step()  # the model calls it before its lookups
        if rows is None:
            self._tracker.record_ids(features)
        else:
            self._tracker.record_embeddings(features, rows)
        if self._auto_compact:
            self._tracker.trigger_compaction()

    def read(self) -> Found:
        """Return and clear the changes; TorchRec compacts in its read."""
        return {name: (rows.ids, rows.states) for name, rows in self._tracker.get_unique().items()}


class _NoModel(nn.Module):
    """Model without tables, for the constructor of TorchRec's tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Identity()


def lookups(ids: Mapping[str, Tensor]) -> KeyedJaggedTensor:
    """Build a batch for :meth:`Store.record` from table to ids ``[N]``, each id in its own bag."""
    values = torch.cat(list(ids.values()))
    features = KeyedJaggedTensor(keys=list(ids), values=values, lengths=torch.ones_like(values, dtype=torch.int32))
    features.length_per_key()  # in training, the input distribution has computed it before the lookup
    return features


def assert_same(found: Found, expected: Found) -> None:
    """Raise unless both hold the same rows; the order of ``expected`` does not matter."""
    assert found.keys() == expected.keys()
    for name, (ids, rows) in found.items():
        other_ids, order = expected[name][0].sort()
        assert torch.equal(ids, other_ids), f"{name}: other ids"
        other_rows = expected[name][1]
        assert (rows is None) == (other_rows is None)
        if rows is not None and other_rows is not None:
            assert torch.equal(rows, other_rows[order]), f"{name}: other rows"
