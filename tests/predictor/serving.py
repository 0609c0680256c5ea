"""Predictors of the streams in tests/stream/histories.py, and followers whose requests fail."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import ModelMismatchError, StreamError
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import When, always, fails, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock, History, clocked
from tests.waiting import eventually


def empty_model() -> dict[str, Tensor]:
    """Return a model with every table and dense tensor that a history may have."""
    return {
        "a": torch.full((12, 4), -1.0),
        "b": torch.full((7, 8), -1.0, dtype=torch.bfloat16),
        "c": torch.full((5, 2), -1.0),
        "w": torch.full((3,), -1.0),
        "x": torch.full((3,), -1),
    }


def same(model: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    """Return whether a model equals a history's state bit for bit."""
    return all(
        torch.equal(model[name.removeprefix("dense ")].view(-1).view(torch.uint8), held.view(-1).view(torch.uint8))
        for name, held in state.items()
    )


def assert_holds(model: dict[str, Tensor], history: History, version: int) -> None:
    assert same(model, history.states[version]), f"not version {version}"


def _equal_elements(found: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements whose bytes are equal."""
    pair = [each.contiguous().view(-1, 1).view(torch.uint8) for each in (found, expected)]
    return (pair[0] == pair[1]).all(1)


def assert_is_between(model: dict[str, Tensor], history: History, version: int, begun: int) -> None:
    """Check that each element is of ``version`` or of a later one up to ``begun``; dense tensors are of ``version``."""
    for name, held in history.states[version].items():
        found = model[name.removeprefix("dense ")]
        versions = [version] if name.startswith("dense ") else range(version, begun + 1)
        states = [history.states[each].get(name, held) for each in versions]
        matches = torch.stack([_equal_elements(found, state) for state in states])
        assert matches.any(0).all(), f"{name} has rows that are older than version {version} or newer than {begun}"


class PanicException(BaseException):
    """Panic of Rust code as obstore raises it; pyo3 makes one such class per extension."""


class Breakable(TensorTarget):
    """A table whose writes raise injected errors and are counted."""

    num_writes = 0
    before_write: Callable[[int], None] = staticmethod(lambda number: None)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        self.num_writes += 1
        self.before_write(self.num_writes)
        super().write(ids, values, columns)


class Follower:
    """A predictor and its model, which after every call must equal the version that the predictor reports."""

    def __init__(self, history: History, state: dict | None = None, model: dict | None = None) -> None:
        self.history = history
        is_unreadable = on(name=lambda name: name in history.unreadable)
        self.storage = WrappedStorage(history.storage, fails(is_unreadable, "403 forbidden"))
        self.model = empty_model() if model is None else model
        self.targets = {
            name: Breakable.of(tensor) if tensor.dim() > 1 else tensor for name, tensor in self.model.items()
        }
        self.predictor = Predictor(ModelTarget(self.targets, chunk_rows=2), self.storage)
        if state is not None:
            self.predictor.load_state_dict(state)
        self.is_lost = False  # its tables are of a history that was cut off and restarted
        self.begun = -1  # a version of which an earlier predictor of these tables may have written some rows

    def break_at(self, count: int, kind: type[Exception]) -> None:
        """Make the ``count``-th next write raise once; later writes succeed."""
        left = [count]

        def write(_: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise kind("no memory")

        for target in self.targets.values():
            if isinstance(target, Breakable):
                target.before_write = write

    def cut_off(self, when: When = always) -> None:
        """Let requests of the predictor fail, instead of those that failed before."""
        self.storage.rules[1:] = [fails(when)]

    def connect(self) -> None:
        self.cut_off(lambda _: False)

    def sync(self, limit: int | None = None) -> Exception | None:
        error = None
        try:
            self.predictor.sync(limit)
        except (StreamError, MemoryError, torch.OutOfMemoryError) as caught:
            error = caught
        else:
            self.is_lost = False
        self.check()
        return error

    def follow(self, num_requests: int) -> None:
        """Follow in the background until the store got ``num_requests`` requests; the thread must not end by itself."""
        if self.predictor.status().pinned is not None:
            return  # nothing is read after a rollback
        end = self.storage.count() + num_requests
        try:
            self.predictor.follow(poll_seconds=1e-6)
        except ModelMismatchError:
            self.check()
            return
        eventually(lambda: self.storage.count() >= end or not self._is_following)
        assert self._is_following, f"it ended: {self.predictor.error}"
        # Raises the last fault, if any.
        with contextlib.suppress(StreamError, MemoryError, torch.OutOfMemoryError):
            self.predictor.stop()
        self.check()

    @property
    def _is_following(self) -> bool:
        return any(thread.name == "predictor" for thread in threading.enumerate())

    def check(self) -> None:
        with self.predictor.reading() as served:
            if served.version is not None and served.applying is None and not self.is_lost:
                if self.begun > served.version:
                    assert_is_between(self.model, self.history, served.version, self.begun)
                else:
                    assert_holds(self.model, self.history, served.version)

    def restart(self) -> Follower:
        """Return a new predictor of the same tables, which may have newer rows of a partly applied version."""
        with self.predictor.reading() as served:
            applying = -1 if served.applying is None else served.applying
        restarted = Follower(self.history, self.predictor.state_dict(), self.model)
        restarted.is_lost, restarted.begun = self.is_lost, max(self.begun, applying)
        return restarted


def read(storage: Storage, name: str) -> bytes:
    return storage.read(name, max_bytes=1 << 24).tobytes()


def a_history(seed: int, num_steps: int, clock: Clock | None = None) -> History:
    history = History(Storage("memory://") if clock is None else clocked(clock), seed)
    chance = random.Random(seed)
    for _ in range(num_steps):
        kind = chance.choice(["delta"] * 5 + ["claim", "snapshot", "compact"])
        if kind == "compact":
            compact(history.storage, fold=chance.choice([0.2, 1e9]))
        else:
            getattr(history, kind)()
            if kind == "claim":
                history.snapshot()
    return history
