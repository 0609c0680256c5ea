"""Read the rows that a rank holds, straight from the kernels' memory."""

from __future__ import annotations

import torch
from torch import Tensor

from delta_tracker.sharding.discover import LocalShard


def column_views(shard: LocalShard) -> list[Tensor]:
    """Live views ``[R, columns]``, one for each column range of the shard, in order; caches are flushed first."""
    views = []
    for kernel, slot in shard.places:
        kernel.module.flush()
        views.append(kernel.module.split_embedding_weights()[slot].detach())
    return views


def read_rows(shard: LocalShard, ids: Tensor | None = None) -> Tensor:
    """A copy of rows.

    Args:
        shard: where from.
        ids: ``[N]`` int64 local ids; None for all rows.

    Returns:
        ``[N, D]`` in the table's dtype, the columns in the order of ``shard.spec.columns``; ``[0, D]`` where the
        rank holds nothing of the table.
    """
    views = column_views(shard)
    if not views:
        return torch.empty(0, 0, dtype=shard.spec.table.dtype, device=shard.device)
    picked = [view.clone() if ids is None else view.index_select(0, ids) for view in views]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim=1)
