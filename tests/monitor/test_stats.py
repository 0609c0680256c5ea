"""Stats: windows, policies, labels, timers, passive stats, with a clock that the test sets."""

from __future__ import annotations

import asyncio
import enum
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Kind, Monitor, Window
from delta_tracker.monitor.names import exposed
from tests.monitor.clocks import ManualClock

_MEAN = ("mean", "sum")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def monitor(clock) -> Monitor:
    return Monitor(clock)


def _windows(batch, name):
    return [each for each in batch.windows if each.definition.name == name]


def _total(batch, name):
    return sum(each.figures.total for each in batch.totals if each.definition.name == name)


def _figures(batch, name):
    return [(each.count, each.values) for each in _windows(batch, name)]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.integers(1, 5)),
    st.booleans(),
    st.lists(st.sampled_from(["add", "add", "add", "tick", "collect", "epoch"]), max_size=80),
)
def test_windows_against_a_slow_reference(count, seconds, epoch, schedule) -> None:
    clock = ManualClock()
    monitor = Monitor(clock)
    every = None if seconds is None else timedelta(seconds=seconds)
    window = Window(count=count, every=every, epoch=epoch)
    stat = monitor.stat("s", window=window, aggregations=("sum",))
    expected, is_open, begin, found, number = [], [], clock.now_ns, [], 0
    collects = count is None and seconds is None and not epoch

    def close() -> None:
        nonlocal is_open, begin
        if is_open:
            expected.append((tuple(is_open), begin, clock.now_ns))
        is_open, begin = [], clock.now_ns

    for action in schedule:
        if action == "add":
            number += 1
            stat.add(number)
            is_open.append(number)
            if len(is_open) == count:
                close()
        elif action == "tick":
            clock.go(1)
        elif action == "collect":
            found += _windows(monitor.collect(), "s")
            if collects or (seconds is not None and clock.now_ns - begin >= seconds * 1e9):
                close()
        else:
            monitor.end_epoch()
            if epoch:
                close()
    found += _windows(monitor._collector.collect(is_last=True), "s")
    close()
    assert [(w.values["sum"], w.count, w.window.begin_ns, w.window.end_ns) for w in found] == [
        (sum(records), len(records), begin, end) for records, begin, end in expected
    ]
    assert _total(monitor.collect(), "s") == number * (number + 1) / 2


def test_windows_by_count_carry_the_step_and_time_of_their_last_record(monitor, clock) -> None:
    stat = monitor.stat("loss", window=Window(count=20), aggregations=_MEAN)
    for step in range(50):
        monitor.step(step)
        stat.add(step)
        clock.go(1)
    reports = _windows(monitor.collect(), "loss")
    assert [report.window.step for report in reports] == [19, 39]
    assert [report.values["mean"] for report in reports] == [9.5, 29.5]
    assert reports[1].window.time_ns - reports[0].window.time_ns == 20 * 10**9


def test_a_large_count_is_split_exactly(monitor) -> None:
    stat = monitor.stat("s", window=Window(count=1500), aggregations=("sum",))
    for number in range(4000):
        stat.add(number)
    found = _figures(monitor._collector.collect(is_last=True), "s")
    sums = [sum(range(1500)), sum(range(1500, 3000)), sum(range(3000, 4000))]
    assert found == [(1500, {"sum": sums[0]}), (1500, {"sum": sums[1]}), (1000, {"sum": sums[2]})]


def test_no_data_is_not_zero(monitor) -> None:
    monitor.stat("silent")
    monitor.gauge("zeroed", when_empty="zero", aggregations=("value", "mean"))
    batch = monitor.collect()
    assert _figures(batch, "silent") == []
    assert _figures(batch, "zeroed") == [(0, {"value": 0, "mean": 0})]
    assert not [total for total in batch.totals if total.definition.name in ("silent", "zeroed")]


def test_a_figure_without_data_is_left_out(monitor) -> None:
    stat = monitor.stat("s", aggregations=("std", "mean"))
    stat.add(4)
    assert _figures(monitor.collect(), "s") == [(1, {"mean": 4})]


def test_the_user_overrides_what_the_code_says(monitor) -> None:
    before = monitor.stat("training.loss", aggregations=("mean",))
    assert monitor.configure("training.*", aggregations=("p95", "count"), window=Window(count=3)) == ["training.loss"]
    after = monitor.stat("training.accuracy", aggregations=("mean",))
    other = monitor.stat("serving.loss", aggregations=("mean",))
    for stat in (before, after, other):
        for value in (1.0, 2.0, 3.0):
            stat.add(value)
    batch = monitor.collect()
    assert set(_windows(batch, "training.loss")[0].values) == {"p95", "count"}
    assert set(_windows(batch, "training.accuracy")[0].values) == {"p95", "count"}
    assert _figures(batch, "serving.loss") == [(3, {"mean": 2.0})]


def test_the_latest_pattern_wins_setting_by_setting(monitor) -> None:
    stat = monitor.stat("a.b")
    monitor.configure("a.*", raw=3, aggregations=("sum",))
    monitor.configure("*", aggregations=("max",))
    assert (stat.policy.raw, stat.policy.aggregations) == (3, ("max",))
    monitor.configure("a.*", raw=4)
    assert (stat.policy.raw, stat.policy.aggregations) == (4, ("sum",))


def test_a_changed_policy_ends_the_window_and_loses_nothing(monitor) -> None:
    stat = monitor.stat("s", aggregations=("sum",), window=Window(count=10))
    stat.add(1)
    monitor.configure("s", aggregations=("std", "p50"), window=Window())
    stat.add(2)
    stat.add(4)
    first, second = _windows(monitor.collect(), "s")
    assert first.window.is_partial
    assert first.window.aggregate.total == 1
    assert second.values["std"] == pytest.approx(2**0.5)
    assert _total(monitor.collect(), "s") == 7


def test_disabled_stats_take_nothing_until_they_are_enabled(monitor) -> None:
    stat = monitor.counter("c", enabled=False)
    cell = stat.cell()
    assert not stat.enabled
    stat.add(1)
    cell.add(1)
    assert not monitor.collect().totals
    monitor.configure("c", enabled=True)
    cell.add(5)
    assert _figures(monitor.collect(), "c") == [(1, {"sum": 5})]


@pytest.mark.parametrize(
    "settings_",
    [{"windows": 3}, {"raw": -1}, {"when_empty": "hide"}, {"aggregations": ("x",)}, {"enabled": 1}, {"window": 5}],
    ids=str,
)
def test_bad_settings_change_nothing(monitor, settings_) -> None:
    stat = monitor.stat("s")
    policy = stat.policy
    with pytest.raises(InvalidArgumentError):
        monitor.configure("*", **settings_)
    with pytest.raises(InvalidArgumentError):
        monitor.stat("t", **settings_)
    assert stat.policy == policy
    assert [each.name for each in monitor.find()] == ["s"]


@pytest.mark.parametrize("bad", ["", "1a", "a b", "a..b", "a-b", ".a", "a.", "x" * 201, "ä", None])
def test_malformed_names_are_refused(monitor, bad) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        monitor.counter(bad)


@pytest.mark.parametrize("labels", [["le"], ["quantile"], ["__x"], ["a", "a"], ["1"], [3]])
def test_malformed_labels_are_refused(monitor, labels) -> None:
    with pytest.raises(InvalidArgumentError, match="labels"):
        monitor.counter("c", labels=labels)


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
        with pytest.raises(InvalidArgumentError, match="exactly the labels"):
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


def test_timers(monitor, clock) -> None:
    stat = monitor.histogram("seconds", unit="seconds", aggregations=("sum", "count"))
    with stat.time():
        clock.go(2)

    @stat.time()
    def work(seconds: float) -> str:
        clock.go(seconds)
        return "done"

    @stat.time()
    async def wait(seconds: float) -> str:
        await asyncio.sleep(0)
        clock.go(seconds)
        return "waited"

    assert (work(3), asyncio.run(wait(4))) == ("done", "waited")
    assert work.__name__ == "work"
    with pytest.raises(ZeroDivisionError), stat.time():
        clock.go(0 / 0)
    assert _figures(monitor.collect(), "seconds") == [(4, {"sum": 9.0, "count": 4})]


def test_a_decorated_function_may_call_itself(monitor, clock) -> None:
    stat = monitor.stat("seconds", aggregations=("sum",))

    @stat.time()
    def nested(depth: int) -> None:
        clock.go(1)
        if depth:
            nested(depth - 1)

    nested(2)
    assert _figures(monitor.collect(), "seconds")[0] == (3, {"sum": 6.0})


def test_passive_stats_are_read_once_per_collection(monitor) -> None:
    readings = iter([3, None, {"x": 1}, 9, 4])
    monitor.passive("p", lambda: next(readings))
    total = iter([10, 25, 5])
    monitor.passive("total", lambda: next(total), kind=Kind.COUNTER)
    monitor.passive("by", lambda: {"a": 1, "b": 2}, labels=["k"])
    monitor.passive("pair", lambda: {("a", "b"): 1}, labels=["k", "l"])
    batches = [monitor.collect() for _ in range(3)]
    assert [_figures(batch, "p") for batch in batches] == [[(1, {"value": 3})], [], []]
    assert [_figures(batch, "total") for batch in batches] == [
        [(1, {"sum": 10})],
        [(1, {"sum": 15})],
        [(1, {"sum": 5})],
    ]
    assert {each.labels for each in batches[0].windows if each.definition.name == "by"} == {
        (("k", "a"),),
        (("k", "b"),),
    }
    with pytest.raises(InvalidArgumentError, match="callback"):
        monitor.passive("p", lambda: 1)


def test_a_callback_that_raises_harms_nobody(monitor, caplog) -> None:
    def broken() -> float:
        raise RuntimeError("broken on purpose")

    monitor.passive("broken", broken)
    monitor.passive("fine", lambda: 1)
    for _ in range(3):
        batch = monitor.collect()
    assert _figures(batch, "fine") == [(1, {"value": 1})]
    assert len([record for record in caplog.records if "broken" in record.message]) == 1
    counts = {t.labels: t.figures.total for t in monitor.collect().totals if t.definition.name.endswith("_errors")}
    assert counts == {(("outlet", "broken"),): 1}


def test_raw_records_are_bounded_and_a_fair_sample(monitor) -> None:
    stat = monitor.stat("s", raw=8)
    for value in (1.0, 2.0):
        stat.add(value)
    assert _windows(monitor.collect(), "s")[0].window.raw == (1.0, 2.0)
    hits = [0] * 20
    for _ in range(300):
        for value in range(20):
            stat.add(value)
        raw = _windows(monitor.collect(), "s")[0].window.raw
        assert len(set(raw)) == 8
        for value in raw:
            hits[value] += 1
    # Each of 20 is drawn with probability 0.4: 120 of 300, deviation 8.5.
    assert all(70 < hit < 170 for hit in hits)


def test_windows_that_nobody_collects_are_bounded_and_counted(monitor) -> None:
    stat = monitor.stat("s", window=Window(count=1))
    for value in range(1030):
        stat.add(value)
    batch = monitor.collect()
    assert len(_windows(batch, "s")) == 1024
    lost = [t.figures.total for t in monitor.collect().totals if t.definition.name == "delta_tracker_lost_windows"]
    assert lost == [6]


def test_a_label_has_the_cell_of_its_text(monitor) -> None:
    class Kinds(str, enum.Enum):  # noqa: UP042  not StrEnum, whose text is its value
        DELTA = "delta"

    stat = monitor.counter("kinds", labels=["kind"])
    stat.cell(kind="delta").add(1)
    assert stat.cell(kind=Kinds.DELTA) is stat.cell(kind=str(Kinds.DELTA)) is not stat.cell(kind="delta")
    assert stat.cell(kind=[1]) is stat.cell(kind="[1]")
