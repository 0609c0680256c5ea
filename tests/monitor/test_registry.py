"""The registry: definitions are unique, are found by pattern, and can be removed."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Kind
from delta_tracker.monitor.names import exposed


def test_definitions_are_unique(monitor) -> None:
    stat = monitor.stat("training.loss", "Loss.", unit="nats")
    assert monitor.stat("training.loss", "Loss.", unit="nats") is stat
    for name, options in {"training.loss": {"unit": "bits"}, "training_loss": {"unit": "nats"}}.items():
        with pytest.raises(InvalidArgumentError, match="defined as"):
            monitor.stat(name, "Loss.", **options)
    assert exposed("training.loss") == "training_loss"


def test_find_by_pattern_and_kind(monitor) -> None:
    monitor.counter("a.c")
    monitor.gauge("a.g")
    monitor.stat("b.s", "Help.", unit="seconds")
    assert [stat.name for stat in monitor.find("a.*")] == ["a.c", "a.g"]
    assert [stat.name for stat in monitor.find(kind=Kind.GAUGE)] == ["a.g"]
    (found,) = monitor.find("b.*")
    assert (found.definition.help, found.definition.unit) == ("Help.", "seconds")


def test_unregistered_stats_are_gone_and_harmless(monitor) -> None:
    stat = monitor.counter("c")
    stat.add(1)
    monitor.registry.unregister("c")
    monitor.registry.unregister("c")
    stat.add(1)
    assert not monitor.collect().totals
    monitor.gauge("c").set(2.0)
    assert monitor.collect().totals[0].definition.kind is Kind.GAUGE
