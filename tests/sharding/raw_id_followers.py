"""Predictors of managed-collision modules whose answers are checked after every hold of the lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from delta_tracker import ModelTarget, Predictor
from delta_tracker.predictor.placement import Chunk
from delta_tracker.raw_ids import RawIdMap
from tests.predictor.identity_histories import FQN, Follower, History, State
from tests.stores.wrapped import WrappedStorage

_NUM_CODES = 255  # of a row that is quantized to eight bits


class ModelFollower(Follower):
    """Predictor of a model with one table.

    Args:
        history: the trainer.
        model: return a new model, in evaluation mode.
        table: name of the table in the model.
        raw_id_map: return the mapping of a model.
        slots: return the row that each raw id reads in a model, -1 for none.
        is_quantized: True for rows of eight bits.
    """

    def __init__(
        self,
        history: History,
        *,
        model: Callable[[], nn.Module],
        table: str,
        raw_id_map: Callable[[nn.Module], RawIdMap],
        slots: Callable[[nn.Module, Tensor], Tensor],
        is_quantized: bool = False,
    ) -> None:
        self.history, self.storage = history, WrappedStorage(history.storage)
        self._new = model
        self._table, self._map, self._slots, self._is_quantized = table, raw_id_map, slots, is_quantized
        self._left = 0
        self.model = model()
        self._initial = self.lookups()
        names = {FQN: table}
        self._follow(Predictor(ModelTarget(self.model, names=names, dense=False, chunk_rows=1), self.storage))

    def lookups(self) -> tuple[Tensor, Tensor]:
        """Return the row that each raw id reads, and its content."""
        raw_ids = self.history.raw_ids
        return self._slots(self.model, raw_ids), self.model(raw_ids)

    def is_initial(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Return a mask of the answers that are those of before the first version."""
        return (slots == self._initial[0]) & (rows == self._initial[1]).all(1)

    def equal(self, rows: Tensor, expected: Tensor) -> Tensor:
        """Return a mask of the rows that are equal, up to the error of eight bits."""
        if not self._is_quantized:
            return super().equal(rows, expected)
        span = expected.amax(1) - expected.amin(1)
        return (rows - expected).abs().amax(1) <= 0.51 * span / _NUM_CODES + expected.abs().amax(1) * 2**-9

    def assert_is(self, state: State) -> None:
        """Check the mapping, and all answers."""
        slots, rows = self.lookups()
        assert torch.equal(slots, state.slots_of(self.history.raw_ids))
        has_row = slots >= 0
        assert bool(self.equal(rows[has_row], state.rows[slots[has_row]]).all())
        assert torch.equal(self._map(self.model).owners(), state.owners)

    def sync(self, limit: int | None = None) -> bool:
        """Return True if the call succeeds."""
        with self._breaking():
            return super().sync(limit)

    def rollback(self, version: int) -> bool:
        """Return True if the call succeeds."""
        with self._breaking():
            return super().rollback(version)

    def break_at(self, count: int) -> None:
        """Make the ``count``-th next write raise once."""
        self._left = count

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        write = Chunk.write

        def checked(chunk: Chunk) -> None:
            self._left -= 1
            if self._left == 0:
                raise MemoryError("no memory")
            write(chunk)

        with mock.patch.object(Chunk, "write", checked):
            yield

    def restarted(self) -> Follower:
        """Return a new predictor with the saved tables, mapping and position, as they are now."""
        with self.predictor.reading() as (_, applying):
            tables = {name: value.clone() for name, value in self.model.state_dict().items()}
            state = self.predictor.state_dict()
        found = ModelFollower(
            self.history,
            model=self._new,
            table=self._table,
            raw_id_map=self._map,
            slots=self._slots,
            is_quantized=self._is_quantized,
        )
        found.model.load_state_dict(tables)
        found._initial = self._initial
        found.kept = set(self.kept if applying is None else self.served)
        found.kept_at = self.predictor.version
        found.predictor.load_state_dict(state)
        return found
