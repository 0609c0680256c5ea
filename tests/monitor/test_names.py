"""Names and labels that a sink could not carry are refused."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError


@pytest.mark.parametrize("bad", ["", "1a", "a b", "a..b", "a-b", ".a", "a.", "x" * 201, "ä", None])
def test_malformed_names_are_refused(monitor, bad) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        monitor.counter(bad)


@pytest.mark.parametrize("labels", [["le"], ["quantile"], ["__x"], ["a", "a"], ["1"], [3]])
def test_malformed_labels_are_refused(monitor, labels) -> None:
    with pytest.raises(InvalidArgumentError, match="labels"):
        monitor.counter("c", labels=labels)


@pytest.mark.parametrize("labels", ["table", None, 3])
def test_label_names_are_a_list(monitor, labels) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Pass a list of label names, for example labels=\['table'\]"):
        monitor.counter("c", labels=labels)


@pytest.mark.parametrize(
    "options",
    [{"help": ["t"]}, {"help": None}, {"unit": 3}, {"bounds": 3}, {"bounds": (1, 2, 3)}, {"bounds": (1, 1)}],
)
def test_other_options_of_the_wrong_type_are_refused(monitor, options) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        monitor.histogram("h", **options)


def test_a_label_may_have_the_name_of_an_argument(monitor) -> None:
    stat = monitor.gauge("g", labels=["self", "function"])
    stat.cell(self="a", function="b").add(3)
    stat.remove(self="a")
    assert not stat.cells


def test_readings_have_a_value_for_each_label(monitor, caplog) -> None:
    monitor.passive("p", lambda: {"a": 1}, labels=["x", "y"])
    monitor.collect()
    assert "Return one value for each of the labels ['x', 'y'] of 'p'" in caplog.text
