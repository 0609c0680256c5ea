"""The tables of a kernel are marked together on a device, and each reads the rows that it would read alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows
from delta_tracker.tracker.store import marked_rows
from delta_tracker.tracker.store.segments import SegmentStore
from tests.syncs import SIMULATED, find_syncs, held, on_device

_NUM_ROWS = 40


class _Launches(TorchDispatchMode):
    """Counts the operations on a device, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def _store(weights: Tensor | None, device: torch.device, num_rows: int = _NUM_ROWS) -> SegmentStore:
    old_states = None if weights is None else (lambda ids: weights.index_select(0, ids))
    return SegmentStore(num_rows, device, engine="torch", old_states=old_states)


def _num_launches(num_tables: int, method: str, *, with_states: bool) -> int:
    """Return the number of operations that record the second batch after a cut."""
    weights = on_device(torch.zeros(_NUM_ROWS, 2)) if with_states else None
    stores = {str(table): _store(weights, SIMULATED) for table in range(num_tables)}
    log = ChangeLog(stores, ["reader"], delete_on_read=True, max_bytes=None)
    for key in (0, 1):
        ids = {name: on_device(torch.tensor([key, 1, 7, -1])) for name in stores}
        with find_syncs() as waits, _Launches() as launches:
            log.writes.begin_write(key, ids) if method == "begin_write" else log.writes.looked_up(ids)
        assert not waits
    return launches.num


@pytest.mark.parametrize("method", ["begin_write", "looked_up"])
def test_the_launches_of_a_batch_do_not_grow_with_the_number_of_tables(method: str) -> None:
    """Each table once took six operations for each batch: 156 for the 26 tables of one kernel."""
    with find_syncs():
        few, many = (_num_launches(num_tables, method, with_states=False) for num_tables in (2, 100))
        alone = _num_launches(1, method, with_states=False)
    assert few == many <= 14
    assert alone <= 6


def test_with_old_states_each_table_takes_only_the_launches_that_copy_them() -> None:
    """Each table once took 29 operations for each batch, of which 21 marked its rows."""
    with find_syncs():
        two, three, many = (_num_launches(num_tables, "begin_write", with_states=True) for num_tables in (2, 3, 100))
    assert many - two == (three - two) * 98
    assert three - two <= 10


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_table_has_the_rows_that_it_has_alone(seed: int, with_states: bool) -> None:
    draw = random.Random(seed)
    sizes = {str(table): draw.choice([0, 1, 7, _NUM_ROWS]) for table in range(draw.randrange(1, 6))}
    host = {name: torch.arange(2.0 * size).view(size, 2) for name, size in sizes.items()}
    with find_syncs():
        there = {name: on_device(rows) for name, rows in host.items()}  # shares the data of host
        alone, together = (
            ChangeLog(
                {name: _store(weights[name] if with_states else None, device, size) for name, size in sizes.items()},
                ["often", "seldom"],
                delete_on_read=True,
                max_bytes=None,
            )
            for weights, device in ((host, torch.device("cpu")), (there, SIMULATED))
        )
        for key in range(40):
            names = draw.sample(sorted(sizes), draw.randrange(len(sizes) + 1))
            ids = {
                name: torch.tensor([draw.randrange(-2, 42) for _ in range(draw.randrange(5))]).long() for name in names
            }
            whole = draw.random() < 0.1
            alone.writes.begin_write(key, dict.fromkeys(names) if whole else ids)
            there = {name: on_device(own) for name, own in ids.items()}
            together.writes.begin_write(key, dict.fromkeys(names) if whole else there)
            for name in names:
                rows = ids[name].where((ids[name] >= 0) & (ids[name] < sizes[name]), 0)
                if sizes[name]:
                    host[name].index_fill_(0, rows, 100.0 + key)
            stays_open = draw.random() < 0.1
            for log in (alone, together):
                if not stays_open:
                    log.writes.end_write(key, names)
                log.consumers.step()
            if draw.random() < 0.3:
                _compare(alone, together, draw.choice(["often", "often", "seldom"]))
        _compare(alone, together, "seldom")


def _compare(alone: ChangeLog, together: ChangeLog, consumer: str) -> None:
    reads = [log.consumers.read(consumer) for log in (alone, together)]
    expected, found = (read.rows for read in reads)
    for read, log in zip(reads, (alone, together), strict=True):
        log.consumers.abort(read)
        log.consumers.clear(consumer)
    for name, rows in expected.items():
        assert held(found[name].ids).tolist() == rows.ids.tolist()
        if rows.states is not None:
            assert torch.equal(held(found[name].known), rows.known)
            assert torch.equal(held(found[name].states).nan_to_num(), rows.states.nan_to_num())


class _Failing(TorchRows):
    """Engine without operations on several sets, of which one method fails."""

    failing = ""

    create_each = classmethod(RowSet.create_each.__func__)  # type: ignore[attr-defined, assignment]
    mark_each = classmethod(RowSet.mark_each.__func__)  # type: ignore[attr-defined, assignment]
    mark_new_padded_each = classmethod(RowSet.mark_new_padded_each.__func__)  # type: ignore[attr-defined, assignment]
    scan_each = classmethod(RowSet.scan_each.__func__)  # type: ignore[attr-defined, assignment]
    count_each = classmethod(RowSet.count_each.__func__)  # type: ignore[attr-defined, assignment]

    def _fail(self, name: str) -> None:
        if self.failing == name:
            raise LookupError(f"{name} does not compile")

    def mark(self, ids: Tensor) -> None:
        self._fail("mark")
        super().mark(ids)

    def mark_new_padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self._fail("mark_new_padded")
        return super().mark_new_padded(ids)

    def scan(self) -> Tensor:
        self._fail("scan")
        return super().scan()

    def count(self) -> int:
        self._fail("count")
        return super().count()


@pytest.mark.parametrize("failing", ["mark", "mark_new_padded", "scan", "count"])
@pytest.mark.parametrize("with_states", [False, True])
def test_an_engine_that_fails_on_a_device_is_replaced(
    with_states: bool, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marked_rows, "choose_engine", lambda *_: _Failing)
    monkeypatch.setattr(_Failing, "failing", "")
    weights = on_device(torch.zeros(_NUM_ROWS, 2)) if with_states else None
    with find_syncs():
        stores = {name: _store(weights, SIMULATED) for name in "ab"}
        log = ChangeLog(stores, ["reader"], delete_on_read=True, max_bytes=None)
        changed = {"a": {1, 2}, "b": {3}}
        log.writes.begin_write(0, {name: on_device(torch.tensor([*rows])) for name, rows in changed.items()})
        log.writes.end_write(0, changed)
        _Failing.failing = failing
        log.writes.begin_write(1, {"a": on_device(torch.tensor([5]))})
        log.writes.end_write(1, {"a": None})
        if failing == "count":
            log.consumers.num_pending("reader")
        read = log.consumers.read("reader")
        rows = read.rows
        log.consumers.abort(read)
        assert {1, 2, 5} <= set(held(rows["a"].ids).tolist())
        assert 3 in held(rows["b"].ids).tolist()
        fails = failing != ("mark" if with_states else "mark_new_padded")
        assert (stores["a"].engine is TorchRows) == fails
