"""Warning about tables of which nearly all rows are sent with each delta: :class:`LargeDeltas`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from delta_tracker.types import TableSpec

_logger = logging.getLogger(__name__)

_SHARE = 0.5
_NUM_DELTAS = 10


class LargeDeltas:
    """Number of successive deltas that have more than half of the rows of each table."""

    def __init__(self) -> None:
        self._num_large: dict[str, int] = {}

    def saw(self, num_rows: Mapping[str, int], tables: Mapping[str, TableSpec]) -> None:
        """Take the rows of a delta into account, by table. A table is logged once, at its tenth large delta in turn."""
        before, self._num_large = self._num_large, {}
        for fqn, count in num_rows.items():
            if count <= _SHARE * tables[fqn].num_rows:
                continue
            self._num_large[fqn] = before.get(fqn, 0) + 1
            if self._num_large[fqn] != _NUM_DELTAS:
                continue
            _logger.warning(
                "each of the last %d deltas has more than half of the rows of %s. Adam and momentum on dense gradients "
                "change every row that was ever looked up, and weight decay every row. Use sparse=True with SGD, "
                "Adagrad or SparseAdam, or publish less often; the guide's page on training lists optimizers",
                _NUM_DELTAS,
                fqn,
            )
