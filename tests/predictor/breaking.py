"""A table that fails in the middle of a write."""

from __future__ import annotations

from delta_tracker.row_target import TensorTarget


class Breaking(TensorTarget):
    """A table whose n-th write fails half-way."""

    left = -1

    def write(self, ids, values, columns) -> None:
        if self.left == 0:
            self.left = -1
            first, end = columns
            super().write(ids, values[:, : (end - first + 1) // 2], (first, first + (end - first + 1) // 2))
            raise RuntimeError("device lost")
        self.left -= 1
        super().write(ids, values, columns)
