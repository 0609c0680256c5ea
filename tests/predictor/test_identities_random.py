"""Random histories of owners: no raw id ever reads the row of another one, and each complete version is exact."""

from __future__ import annotations

import pytest

from tests.predictor.identity_histories import Follower, History
from tests.sweeps import SWEEPS_ARE_WHOLE

_NUM_STEPS = 40  # per history
_NUM_HISTORIES = 50 if SWEEPS_ARE_WHOLE else 8  # per part
_STEPS = (
    *["delta"] * 6, "snapshot", "restart", "fold", "lose", "fail", "fail", "unreadable", "sync", *["one"] * 5,
    "rollback", "release", "kept", "kept", "newcomer",
)  # fmt: skip


class _Schedule:
    """A stream and one predictor of it; each method is a step that may happen to them."""

    def __init__(self, seed: int) -> None:
        self.history = History(seed)
        self.draw = self.history.random
        self.follower = Follower(self.history)

    def delta(self) -> None:
        self.history.delta()

    def snapshot(self) -> None:
        self.history.snapshot()

    def restart(self) -> None:
        self.history.restart()

    def fold(self) -> None:
        self.history.fold()

    def lose(self) -> None:
        """Delete the parts of a version, so that predictors resync."""
        lost = self.draw.randrange(self.history.version + 1)
        for name in self.history.storage.names("parts"):
            if f"{lost:020}" in name:
                self.history.storage.delete(name)

    def fail(self) -> None:
        self.follower.break_at(self._some_write())
        self.follower.sync(1)
        self.follower.break_at(0)

    def _some_write(self) -> int:
        return self.draw.randrange(1, 2 * self.history.num_rows)

    def unreadable(self) -> None:
        begin = self.follower.storage.num_reads + self.draw.randrange(6)
        self.follower.storage.is_down = lambda number: begin <= number < begin + 3
        self.follower.sync(1)
        self.follower.storage.is_down = lambda _: False

    def sync(self) -> None:
        self.follower.sync()

    def one(self) -> None:
        self.follower.sync(1)

    def rollback(self) -> None:
        if self.draw.random() < 0.3:
            self.follower.break_at(self._some_write())
        self.follower.rollback(self.draw.randrange(self.history.version + 1))
        self.follower.break_at(0)

    def release(self) -> None:
        self.follower.predictor.release()

    def kept(self) -> None:
        self.follower = self.follower.restarted()

    def newcomer(self) -> None:
        self.follower = Follower(self.history)


@pytest.mark.parametrize("part", range(10 if SWEEPS_ARE_WHOLE else 1))
def test_random_owners_never_read_the_row_of_another(part: int) -> None:
    for seed in range(part * _NUM_HISTORIES, (part + 1) * _NUM_HISTORIES):
        schedule = _Schedule(seed)
        for _ in range(_NUM_STEPS):
            getattr(schedule, schedule.draw.choice(_STEPS))()
        schedule.history.snapshot()
        schedule.history.delta()
        schedule.release()
        assert schedule.follower.sync()
        assert schedule.follower.predictor.version == schedule.history.version
