"""Record lookups that no hook records: :func:`mark_lookup`."""

from __future__ import annotations

from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.rows import first_per_id
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.kernel_hooks import KeyedIds
from delta_tracker.tracker.log_writes import LogWrites


def mark_lookup(writes: LogWrites, found: Discovery, kjt: KeyedIds, states: Tensor | None = None) -> None:
    """Mark the rows of a lookup as changed, and record their values from before the change.

    Args:
        writes: receives the rows.
        found: the tracked tables. The ids of a feature are marked in every table in which the feature is looked up.
        kjt: a KeyedJaggedTensor of local ids.
        states: the old values, in the order of ``kjt.values()``, in any shape with one row per id; None to record the
            current ones, if the log keeps them.

    Raises:
        InvalidArgumentError: if the number or width of the rows in ``states`` is wrong. No row is marked then.
    """
    num_ids = kjt.values().numel()
    if states is not None:
        if states.numel() and (num_ids == 0 or states.numel() % num_ids):
            raise InvalidArgumentError("embeddings", tuple(states.shape), f"Pass one row for each of {num_ids} ids")
        states = states.detach().reshape(num_ids, -1) if num_ids else None
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
        writes.mark(fqn, first[0], states=first[1])
