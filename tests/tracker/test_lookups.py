"""The store of raw lookups against TorchRec's store, a slow reference, and invalid input."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_tracker import DeltaStore, EmbdUpdateMode
from delta_tracker.errors import InvalidArgumentError
from tests.sweeps import SWEEPS_ARE_WHOLE

_TABLES = ("a", "b")
_MODES = list(EmbdUpdateMode)


class _Reference:
    """Reference that keeps every lookup as a list of (id, state) and merges by iterating over it."""

    def __init__(self, mode: EmbdUpdateMode) -> None:
        self.mode = mode
        self.lookups: dict[str, list[tuple[int, list[tuple[int, float]]]]] = {}

    def append(self, batch: int, table: str, pairs: list[tuple[int, float]]) -> None:
        self.lookups.setdefault(table, []).append((batch, pairs))

    def merged(self, lookups: list[tuple[int, list[tuple[int, float]]]]) -> list[tuple[int, float]]:
        kept: dict[int, float] = {}
        for _, pairs in lookups:
            for row, state in pairs:
                if row not in kept or self.mode is EmbdUpdateMode.LAST:
                    kept[row] = state
        return sorted(kept.items())

    def delta(self, from_idx: int) -> dict[str, list[tuple[int, float]]]:
        return {
            table: self.merged([each for each in lookups if each[0] >= from_idx])
            for table, lookups in self.lookups.items()
        }

    def compact(self, start: int, end: int) -> None:
        for table, lookups in self.lookups.items():
            inside = [each for each in lookups if start <= each[0] < end]
            if len(inside) > 1:
                before, after = ([each for each in lookups if test(each[0])] for test in (start.__gt__, end.__le__))
                self.lookups[table] = [*before, (start, self.merged(inside)), *after]

    def delete(self, up_to: int | None) -> None:
        if up_to is None:
            self.lookups = {}
        for table, lookups in self.lookups.items():
            self.lookups[table] = [each for each in lookups if each[0] >= up_to]


def _states(mode: EmbdUpdateMode, pairs: list[tuple[int, float]]) -> Tensor | None:
    if mode is EmbdUpdateMode.NONE:
        return None
    return torch.tensor([[state, -state] for _, state in pairs], dtype=torch.float64).reshape(-1, 2)


def _pairs(mode: EmbdUpdateMode, rows: Any) -> list[tuple[int, float]]:
    states = [0.0] * len(rows.ids) if mode is EmbdUpdateMode.NONE else rows.states[:, 0].tolist()
    if mode is not EmbdUpdateMode.NONE:
        assert torch.equal(rows.states[:, 1], -rows.states[:, 0])
    return list(zip(rows.ids.tolist(), states, strict=True))


def _theirs(mode: EmbdUpdateMode) -> Any:
    """Make TorchRec's store, which has another name before version 1.5."""
    store = pytest.importorskip("torchrec.distributed.model_tracker.delta_store")
    types = pytest.importorskip("torchrec.distributed.model_tracker.types")
    modes = getattr(types, "UpdateMode", None) or types.EmbdUpdateMode
    return getattr(store, "DeltaStoreTrec", store.DeltaStore)(modes(mode.value))


def _their_delta(theirs: Any, from_idx: int) -> Any:
    """Return the delta of TorchRec's store; None where it raises because a table has no new rows."""
    read = getattr(theirs, "get_unique", None) or theirs.get_delta
    if any(all(each.batch_idx < from_idx for each in lookups) for lookups in theirs.per_fqn_lookups.values()):
        return None
    return read(from_idx)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("seed", range(8 if SWEEPS_ARE_WHOLE else 3))
def test_random_schedules(mode: EmbdUpdateMode, seed: int) -> None:
    draw = random.Random(seed)
    ours, theirs, reference = DeltaStore(mode), _theirs(mode), _Reference(mode)
    batch = compared = num_empty = 0
    state = 0.0
    for _ in range(150):
        event = draw.choices(["append", "batch", "compact", "delete", "clear"], [8, 5, 2, 1, 0.1])[0]
        first, second = sorted(draw.sample(range(batch + 3), 2))
        if event == "append":
            table = draw.choice(_TABLES)
            ids = [draw.randrange(-4, 9) * 10**12 for _ in range(draw.randrange(5))]
            pairs = [(row, 0.0 if mode is EmbdUpdateMode.NONE else (state := state + 1)) for row in ids]
            for store in (ours, theirs):
                store.append(batch, table, torch.tensor(ids, dtype=torch.int64), _states(mode, pairs))
            reference.append(batch, table, pairs)
        elif event == "batch":
            batch += draw.randrange(1, 3)
        elif event == "compact":
            for store in (ours, theirs, reference):
                store.compact(first, second)
        else:
            for store in (ours, theirs, reference):
                store.delete(first if event == "delete" else None)
        delta = {table: _pairs(mode, rows) for table, rows in ours.get_delta(first).items()}
        assert delta == reference.delta(first)
        num_empty += sum(not pairs for pairs in delta.values())
        expected = _their_delta(theirs, first)
        if expected is not None:
            assert delta == {table: sorted(_pairs(mode, rows)) for table, rows in expected.items()}
            compared += 1
        held = {
            table: [(each.batch_idx, sorted(_pairs(mode, each))) for each in lookups]
            for table, lookups in ours.get_indexed_lookups(first, second).items()
        }
        assert held == {
            table: [(at, sorted(pairs)) for at, pairs in lookups if first <= at < second]
            for table, lookups in reference.lookups.items()
        }
    assert compared > 20
    assert num_empty > 5


@pytest.mark.parametrize("mode", _MODES)
def test_nothing(mode: EmbdUpdateMode) -> None:
    store = DeltaStore(mode)
    assert store.get_delta() == store.get_indexed_lookups(0, 9) == {}
    store.append(0, "t", torch.tensor([], dtype=torch.int64), _states(mode, []))
    for _ in range(2):
        rows = store.get_delta()["t"]
        assert rows.ids.shape == (0,)
        assert rows.states is None if mode is EmbdUpdateMode.NONE else rows.states.shape == (0, 2)
        store.append(3, "t", torch.tensor([5]), _states(mode, [(5, 1.0)]))
        assert store.get_delta(3)["t"].ids.tolist() == [5]
        store.delete(up_to_idx=4)
    store.delete()
    assert store.get_delta() == {}
    store.append(0, "t", torch.tensor([5]), _states(mode, [(5, 1.0)]))
    assert len(store.get_delta()["t"]) == 1


def test_states_are_detached_copies() -> None:
    store = DeltaStore(EmbdUpdateMode.FIRST)
    ids, states = torch.tensor([2, 1]), (torch.ones(2, 3, requires_grad=True) * 2)
    store.append(0, "t", ids, states)
    ids.zero_()
    states.detach().zero_()
    rows = store.get_delta()["t"]
    assert rows.ids.tolist() == [1, 2]
    assert rows.states is not None
    assert not rows.states.requires_grad
    assert (rows.states == 2).all()
    (lookup,) = store.get_indexed_lookups(0, 1)["t"]
    assert lookup.states is not None
    assert lookup.states.grad_fn is None


def _one(batch: int, ids: Any, states: Any = None, *, table: str = "t") -> tuple[Any, ...]:
    return batch, table, torch.as_tensor(ids), None if states is None else torch.as_tensor(states)


@pytest.mark.parametrize(
    ("mode", "arguments", "argument", "remedy"),
    [
        (EmbdUpdateMode.NONE, _one(5, [1], [1.0]), "states", "Pass no states"),
        (EmbdUpdateMode.FIRST, _one(5, [1]), "states", "Pass one state for each id"),
        (EmbdUpdateMode.FIRST, _one(5, [1, 2], [1.0]), "states", "one row for each of 2 ids"),
        (EmbdUpdateMode.FIRST, _one(5, [1], 1.0), "states", "one row for each of 1 ids"),
        (EmbdUpdateMode.FIRST, _one(5, [1], [[1.0]]), "states", "as in the other lookups of 't'"),
        (EmbdUpdateMode.FIRST, _one(5, [1], [1]), "states", "as in the other lookups of 't'"),
        (EmbdUpdateMode.LAST, _one(4, [1], [1.0]), "batch_idx", "'t' is at batch 5"),
        (EmbdUpdateMode.LAST, _one(5, [[1]], [1.0]), "ids", "tensor of integers"),
        (EmbdUpdateMode.NONE, _one(5, [0.5]), "ids", "tensor of integers"),
        (EmbdUpdateMode.NONE, _one(5, [True]), "ids", "tensor of integers"),
        (EmbdUpdateMode.NONE, (5, "t", torch.ones(1, dtype=torch.int64, device="meta")), "ids", "Move them to cpu"),
    ],
)
def test_what_append_refuses(mode: EmbdUpdateMode, arguments: Any, argument: str, remedy: str) -> None:
    store = DeltaStore(mode)
    states = None if mode is EmbdUpdateMode.NONE else torch.tensor([9.0])
    store.append(5, "t", torch.tensor([9], dtype=torch.int32), states)
    store.compact(0, 6)
    with pytest.raises(InvalidArgumentError, match=remedy) as raised:
        store.append(*arguments)
    assert raised.value.argument == argument
    assert store.get_delta()["t"].ids.tolist() == [9]
    assert len(store.get_indexed_lookups(0, 9)["t"]) == 1


def test_a_refused_first_lookup_leaves_no_table() -> None:
    store = DeltaStore(EmbdUpdateMode.LAST)
    with pytest.raises(InvalidArgumentError):
        store.append(0, "t", torch.tensor([1]))
    assert store.get_delta() == {}


def test_other_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match="update_mode='first'"):
        DeltaStore("first")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="before end_idx=2"):
        DeltaStore().compact(2, 2)
