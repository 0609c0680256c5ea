"""Warn about tables of which each delta contains most rows: :class:`LargeDeltas`."""

import logging
from collections import Counter

from delta_tracker.stream.format.manifest import Manifest

_logger = logging.getLogger(__name__)

_SHARE = 0.5
_NUM_DELTAS = 10


class LargeDeltas:
    """Counter, for each table, of consecutive deltas that contain more than half of the table's rows."""

    def __init__(self) -> None:
        self._num_large: dict[str, int] = {}

    def saw(self, delta: Manifest) -> None:
        """Count the rows of a delta. Logs a warning about a table at its tenth consecutive large delta."""
        num_rows: Counter[str] = Counter()
        for part in delta.parts:
            for block in part.blocks:
                num_rows[block.table] += block.num_rows if block.columns[0] == 0 else 0  # once per row
        before, self._num_large = self._num_large, {}
        for fqn, count in num_rows.items():
            if count <= _SHARE * delta.tables[fqn].num_rows:
                continue
            self._num_large[fqn] = before.get(fqn, 0) + 1
            if self._num_large[fqn] != _NUM_DELTAS:
                continue
            _logger.warning(
                "each of the last %d deltas has more than half of the rows of %s. If the batches of a version look up "
                "more than half of the table, publish less often to send fewer bytes. Otherwise, the optimizer changes "
                "the other rows: Adam and momentum on dense gradients change every row that was ever looked up, and "
                "weight decay every row. Use sparse=True with SGD, Adagrad or SparseAdam, or a fused optimizer of "
                "TorchRec; the guide's page on training lists optimizers",
                _NUM_DELTAS,
                fqn,
            )
