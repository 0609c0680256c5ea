"""Recorders: each object of a process has separate metrics, and no gauges after it is closed."""

from __future__ import annotations

import sys
import threading

import pytest

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import MONITOR, Monitor
from delta_tracker.monitor.recorder import Recorder


class Owner:
    pass


def labels(monitor: Monitor) -> set[tuple[str, tuple[str, ...]]]:
    """Return name and label values of all metrics of the library, except those of the monitor itself."""
    return {
        (each.definition.name.removeprefix("delta_tracker_"), tuple(value for _, value in each.labels))
        for each in monitor.collect().totals
        if each.labels and each.labels[0][0] in ("tracker", "publisher", "predictor")
    }


def test_two_objects_of_a_kind_have_separate_metrics() -> None:
    monitor, owners = Monitor(), [Owner(), Owner()]
    first, second = (Recorder("publisher", owner, monitor=monitor) for owner in owners)
    other = Recorder("predictor", owners[0], monitor=monitor)
    expected = [{"publisher": "publisher"}, {"publisher": "publisher-2"}, {"predictor": "predictor"}]
    assert [first.label, second.label, other.label] == expected
    first.published_rows.cell(table="user").add(1)
    second.published_rows.cell(table="user").add(20)
    second.published_version.set(7)
    with first.commit_seconds.timer()():
        pass
    totals = {(each.definition.name, each.labels[0]): each.figures for each in monitor.collect().totals if each.labels}
    rows, versions, seconds = (
        f"delta_tracker_{name}" for name in ("published_rows", "published_version", "commit_seconds")
    )
    assert totals[rows, ("publisher", "publisher")].total == 1
    assert totals[rows, ("publisher", "publisher-2")].total == 20
    assert totals[versions, ("publisher", "publisher-2")].last == 7
    assert (versions, ("publisher", "publisher")) not in totals
    assert totals[seconds, ("publisher", "publisher")].count == 1


def test_another_monitor_has_separate_metrics() -> None:
    one, two, owner = Monitor(), Monitor(), Owner()
    recorders = [Recorder("publisher", owner, name="serving", monitor=monitor) for monitor in (one, two)]
    assert [each.label for each in recorders] == [{"publisher": "serving"}] * 2
    recorders[0].published_version.set(3)
    assert labels(one) == {("published_version", ("serving",))}
    assert labels(two) == set()
    assert Recorder("publisher", owner).monitor is MONITOR


def test_a_closed_one_has_no_gauges_and_its_name_is_free() -> None:
    monitor, owner = Monitor(), Owner()
    first, second = (Recorder("predictor", owner, name="host", monitor=monitor) for _ in range(2))
    for each in (first, second):
        each.applied_version.set(1)
        each.applied_versions.cell(kind="delta").add(1)
    first.close()
    shown = labels(monitor)
    assert ("applied_version", ("host",)) in shown, "the next collection shows the last reading"
    counters = {("applied_versions", ("host", "delta")), ("applied_versions", ("host-2", "delta"))}
    assert labels(monitor) == counters | {("applied_version", ("host-2",))}, "totals of the process stay"
    second.close()
    third = Recorder("predictor", owner, name="host", monitor=monitor)
    assert third.label == {"predictor": "host"}
    assert labels(monitor) == counters, "whoever comes next finds no reading of the former"
    third.applied_version.set(9)
    first.close()
    fourth = Recorder("predictor", owner, name="host", monitor=monitor)
    assert fourth.label == {"predictor": "host-2"}, "a name is freed once"
    assert Recorder("predictor", owner, name="host-2", monitor=monitor).label == {"predictor": "host-2-2"}
    assert ("applied_version", ("host",)) in labels(monitor)
    third.applied_versions.cell(kind="delta").add(1)
    assert monitor.metrics.applied_versions.cell(predictor="host", kind="delta").collect_total() == 2


def test_a_dropped_one_is_forgotten_and_names_do_not_pile_up() -> None:
    monitor = Monitor()
    for _ in range(5):
        owner = Owner()
        recorder = Recorder("predictor", owner, monitor=monitor)
        recorder.applied_version.set(1)
        recorder.watch(lambda _, recorder=recorder: recorder.predictor_lag_versions.set(2))
        assert labels(monitor) == {("applied_version", ("predictor",)), ("predictor_lag_versions", ("predictor",))}
        del owner
    assert labels(monitor) == set()
    assert not monitor.registry.sources


def test_a_watched_owner_is_read_once_per_collection_while_it_lives() -> None:
    monitor, owner = Monitor(), Owner()
    seen: list[object] = []
    recorder = Recorder("tracker", owner, monitor=monitor)
    monitor.collect()
    recorder.watch(seen.append)
    monitor.collect()
    monitor.collect()
    assert seen == [owner, owner]
    recorder.close()
    monitor.collect()
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["", 3, "a\nb", "\ud800", "x" * 201])
def test_an_invalid_name_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        Recorder("tracker", Owner(), name=name, monitor=Monitor())


def test_an_invalid_monitor_or_metric_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="monitor"):
        Recorder("tracker", Owner(), monitor="prometheus")
    recorder = Recorder("publisher", Owner(), monitor=Monitor())
    with pytest.raises(AttributeError, match="nothing"):
        recorder.nothing  # noqa: B018
    with pytest.raises(InvalidArgumentError, match="labels"):
        recorder.applied_versions.cell(kind="delta")


def test_threads_that_build_at_once_get_different_names() -> None:
    monitor, owners = Monitor(), [Owner() for _ in range(8)]
    names: list[str] = []
    begin = threading.Barrier(len(owners))

    def build(owner: Owner) -> None:
        begin.wait()
        names.extend(Recorder("tracker", owner, monitor=monitor).label["tracker"] for _ in range(25))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=build, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(set(names)) == len(names) == 200
