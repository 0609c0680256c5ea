"""The registry: definitions are unique, are found by pattern, and can be removed."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Kind, Monitor
from delta_tracker.monitor.names import exposed


def test_definitions_are_unique(monitor) -> None:
    stat = monitor.stat("training.loss", "Loss.", unit="nats")
    assert monitor.stat("training.loss", "Loss.", unit="nats") is stat
    for name, options in {"training.loss": {"unit": "bits"}, "training_loss": {"unit": "nats"}}.items():
        with pytest.raises(InvalidArgumentError, match="defined as"):
            monitor.stat(name, "Loss.", **options)
    assert exposed("training.loss") == "training_loss"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("counter", "x"), ("counter", "x_total")),
        (("counter", "x"), ("gauge", "x.total")),
        (("counter", "x"), ("gauge", "x_created")),
        (("gauge", "x"), ("gauge", "x_seconds")),
        (("histogram", "x"), ("gauge", "x_seconds_bucket")),
        (("histogram", "x"), ("stat", "x.seconds.sum")),
        (("stat", "x"), ("counter", "x_seconds_count")),
        (("counter", "x"), ("counter", "x.seconds")),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_names_that_are_equal_in_prometheus_are_rejected(first, second, is_swapped) -> None:
    monitor = Monitor()
    unit = "seconds" if "seconds" in second[1] else ""

    def define(kind: str, name: str) -> None:
        getattr(monitor, kind)(name, unit=unit if (kind, name) == first else "")

    one, other = (second, first) if is_swapped else (first, second)
    define(*one)
    with pytest.raises(InvalidArgumentError, match="Prometheus") as caught:
        define(*other)
    assert (caught.value.value, repr(one[1]) in caught.value.remedy) == (other[1], True)
    assert [stat.name for stat in monitor.find()] == [one[1]]


def test_names_that_differ_in_prometheus_are_accepted(monitor) -> None:
    for name in ("x", "x_bucket", "x_sum"):
        monitor.counter(name)
    monitor.gauge("x_total_bytes", unit="bytes")
    assert len(monitor.find()) == 4


def test_a_counter_without_a_name_is_rejected(monitor) -> None:
    for name in ("_total", "_total_total"):
        with pytest.raises(InvalidArgumentError, match="appends _total"):
            monitor.counter(name)


def test_find_by_pattern_and_kind(monitor) -> None:
    monitor.counter("a.c")
    monitor.gauge("a.g")
    monitor.stat("b.s", "Help.", unit="seconds")
    assert [stat.name for stat in monitor.find("a.*")] == ["a.c", "a.g"]
    assert [stat.name for stat in monitor.find(kind=Kind.GAUGE)] == ["a.g"]
    (found,) = monitor.find("b.*")
    assert (found.definition.help, found.definition.unit) == ("Help.", "seconds")
