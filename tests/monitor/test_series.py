"""Cells: one for each combination of labels, all bounded, and nothing is lost."""

from __future__ import annotations

import enum
import math
import warnings
import weakref
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Window
from tests.monitor.figures import windows
from tests.syncs import assert_no_sync, on_device


def test_labels_have_cells_of_their_own(monitor) -> None:
    stat = monitor.counter("rows", labels=["table", "kind"])
    cell = stat.cell(kind="delta", table="user")
    cell.add(2)
    assert stat.cell(table="user", kind="delta") is cell
    stat.cell(table="item", kind="delta").add(3)
    totals = {total.labels: total.figures.total for total in monitor.collect().totals}
    assert totals[("table", "user"), ("kind", "delta")] == 2
    assert totals[("table", "item"), ("kind", "delta")] == 3
    for bad in ({}, {"table": "x"}, {"table": "x", "kind": "y", "more": "z"}, {"table": "x", "kinds": "y"}):
        with pytest.raises(InvalidArgumentError, match="Pass exactly the labels"):
            stat.cell(**bad)
    with pytest.raises(InvalidArgumentError, match="labels"):
        stat.add(1)
    stat.remove(table="user", kind="delta")
    stat.remove(table="user", kind="delta")
    assert [each.labels for each in stat.cells] == [(("table", "item"), ("kind", "delta"))]


def test_cardinality_is_bounded_and_nothing_is_lost(monitor) -> None:
    stat = monitor.counter("c", labels=["user"], max_cells=3)
    for user in range(10):
        stat.cell(user=user).add(1)
    assert len(stat.cells) == 4
    totals = {total.labels: total.figures.total for total in monitor.collect().totals}
    assert totals[(("user", "other"),)] == 7
    assert totals[(("stat", "c"),)] == 7


def test_raw_records_are_bounded_and_a_fair_sample(monitor) -> None:
    stat = monitor.stat("s", raw=8)
    for value in (1.0, 2.0):
        stat.add(value)
    assert windows(monitor.collect(), "s")[0].window.raw == (1.0, 2.0)
    hits = [0] * 20
    for _ in range(300):
        for value in range(20):
            stat.add(value)
        raw = windows(monitor.collect(), "s")[0].window.raw
        assert len(set(raw)) == 8
        for value in raw:
            hits[value] += 1
    # Each of 20 is drawn with probability 0.4: 120 of 300, deviation 8.5.
    assert all(70 < hit < 170 for hit in hits)


def test_uncollected_windows_are_bounded_and_counted(monitor) -> None:
    stat = monitor.stat("s", window=Window(count=1))
    for value in range(1030):
        stat.add(value)
    collection = monitor.collect()
    assert len(windows(collection, "s")) == 1024
    lost = [t.figures.total for t in monitor.collect().totals if t.definition.name == "delta_tracker_lost_windows"]
    assert lost == [6]


def test_a_label_has_the_cell_of_its_text(monitor) -> None:
    class Kinds(str, enum.Enum):  # noqa: UP042  not StrEnum, whose text is its value
        DELTA = "delta"

    stat = monitor.counter("kinds", labels=["kind"])
    stat.cell(kind="delta").add(1)
    assert stat.cell(kind=Kinds.DELTA) is stat.cell(kind=str(Kinds.DELTA)) is not stat.cell(kind="delta")
    assert stat.cell(kind=1) is stat.cell(kind="1")
    assert stat.cell(kind=Path("a")) is stat.cell(kind="a")


@pytest.mark.parametrize("make", [lambda: torch.tensor(2.0), lambda: np.array(2.0), lambda: torch.tensor([2])])
def test_a_record_does_not_change_with_its_value(monitor, make) -> None:
    stat, value = monitor.stat("s", aggregations=("sum", "count")), make()
    for _ in range(3):
        stat.add(value)
        value += 1
    assert stat.cells[0].collect_total() == 2 + 3 + 4


def test_a_record_keeps_no_graph(monitor) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    gone = weakref.ref(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.stat("s").add(loss)
    del loss
    assert gone() is None


def test_integers_of_arrays_are_exact(monitor) -> None:
    stat = monitor.stat("s")
    stat.add(np.int64(2**53 + 1))
    stat.add(torch.tensor(2**53 + 1))
    assert stat.cells[0].collect_total() == 2 * (2**53 + 1)


def test_values_that_are_no_numbers_are_rejected_when_they_are_added(monitor) -> None:
    stat = monitor.stat("s")
    bad = [on_device(torch.tensor(1.0)), torch.ones(2), torch.tensor(1j), np.ones(2), np.datetime64("2020"), "x", None]
    bad += [math.nan, np.inf, 10**400, object()]
    with assert_no_sync():
        for value in bad:
            stat.add(value)
    stat.add(Decimal("1.5"))
    stat.add(np.float32(0.5))
    stat.add(True)
    assert not [each for each in stat.cells[0]._waiting if type(each) not in (int, float)]
    assert stat.cells[0].collect_total() == 3
    assert stat.cells[0].lifetime().num_rejected == len(bad)
