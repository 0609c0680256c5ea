"""Device stats: correct values, no sync, counted NaNs, exact ends of epochs, and metrics of all ranks."""

from __future__ import annotations

import gc
import math
import weakref
from unittest import mock

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.device.classification import FIGURES, DeviceClassification
from delta_tracker.monitor.device.metrics import (
    DeviceCounter,
    DeviceMean,
    DeviceSum,
    reader_of,
)
from delta_tracker.monitor.device.torchmetric import TorchMetric
from tests.fake_streams.simulation import fake_streams
from tests.monitor.clocks import ManualClock
from tests.ranks import RankPool
from tests.syncs import SIMULATED, SyncError, assert_no_sync, find_syncs, held, on_device

_CASES = "tests.monitor.monitoring_cases"
_STATS = [DeviceMean, DeviceSum, DeviceCounter]
_floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


@pytest.fixture
def monitor() -> Monitor:
    return Monitor(ManualClock())


def _windows(monitor, name):
    return [each for each in monitor.collect().windows if each.definition.name == name]


# The helper itself

_WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x.sum() else 2,
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "where": torch.where,
    "mask": lambda x: x[x > 1],
    "write by mask": lambda x: x.__setitem__(x > 1, x[0:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": torch.unique,
    "bincount": lambda x: torch.bincount(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: torch.repeat_interleave(x, x.long()),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
}
_SILENT = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "a number from the host": lambda x: x + torch.tensor(2.0),
    "where": lambda x: torch.where(x > 1, x, 0),
    "index_fill": lambda x: x.clone().index_fill_(0, x.long().clamp(0, 2), 5),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=2),
    "index": lambda x: x[x.long().clamp(0, 2)],
    "new": lambda x: x.new_zeros(4),
    "in place": lambda x: x[1:].add_(1),
}


@pytest.mark.parametrize("call", _WAITING.values(), ids=_WAITING)
def test_waiting_calls_are_detected(call) -> None:
    for everywhere, tensor in ((False, on_device(torch.tensor([1.0, 2, 3]))), (True, torch.tensor([1.0, 2, 3]))):
        with find_syncs(everywhere=everywhere) as found:
            call(tensor)
        assert found
        assert __file__ in found[0].place


@pytest.mark.parametrize("call", _SILENT.values(), ids=_SILENT)
def test_calls_that_do_not_wait_are_not_detected(call) -> None:
    expected = call(torch.tensor([1.0, 2, 3]))
    for everywhere, tensor in ((False, on_device(torch.tensor([1.0, 2, 3]))), (True, torch.tensor([1.0, 2, 3]))):
        with assert_no_sync(everywhere=everywhere):
            result = call(tensor)
        assert result.device == (torch.device("cpu") if everywhere else SIMULATED)
        assert torch.equal(held(result), expected)


_WITH_A_NUMBER = {
    "where": lambda x, number: torch.where(x > 1, x, number),
    "where, the other way": lambda x, number: torch.where(x > 1, number, x),
    "where, its condition": lambda x, number: torch.where(number > 1, x, x),
    "index_put": lambda x, number: x.clone().index_put_((x.long().clamp(0, 2),), number),
    "index": lambda x, number: torch.ops.aten.index(x, [number.long()]),
    "copy": lambda x, number: x.clone().copy_(number),
}


@pytest.mark.parametrize("call", _WITH_A_NUMBER.values(), ids=_WITH_A_NUMBER)
def test_numbers_from_the_host_that_torch_copies_are_detected(call) -> None:
    """torch copies a zero-dimensional CPU tensor to the device here, and waits. Arithmetic reads it on the host."""
    with find_syncs() as found:
        call(on_device(torch.tensor([1.0, 2, 3])), torch.tensor(2.0))
    assert len(found) == 1


_FILLED = {
    "masked_fill": lambda x, number: x.masked_fill(x > 1, number),
    "masked_fill_": lambda x, number: x.clone().masked_fill_(x > 1, number),
    "index_fill_": lambda x, number: x.clone().index_fill_(0, x.long().clamp(0, 2), number),
}


@pytest.mark.parametrize("call", _FILLED.values(), ids=_FILLED)
def test_numbers_on_the_device_that_torch_reads_to_fill_with_are_detected(call) -> None:
    x = on_device(torch.tensor([1.0, 2, 3]))
    for number, waits in ((on_device(torch.tensor(2.0)), True), (torch.tensor(2.0), False), (2.0, False)):
        with find_syncs() as found:
            call(x, number)
        assert bool(found) == waits, number


def test_copies_of_ordinary_memory_to_the_device_wait() -> None:
    for copy in (lambda: torch.as_tensor(1.0, device=SIMULATED), lambda: torch.ones(3).to(SIMULATED)):
        with find_syncs() as found:
            assert copy().device == SIMULATED
        assert len(found) == 1


def test_an_error_names_the_operation_and_the_line() -> None:
    said = r"_local_scalar_dense would wait for the device, at .*test_device.py"
    with pytest.raises(SyncError, match=said), assert_no_sync():
        on_device(torch.ones(1)).item()


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"), assert_no_sync():
        on_device(torch.ones(3)) + torch.ones(3)


# The stats


@pytest.mark.parametrize("kind", _STATS)
def test_nothing_waits(monitor, kind) -> None:
    stat = kind("s", monitor=monitor)
    values = on_device(torch.tensor([1.0, 2.0, float("nan")]))
    with assert_no_sync():
        for value in (values, values[0], 2.5, torch.tensor(3.0), values.to(torch.bfloat16), values > 1, 7):
            stat.update(value)
        if kind in (DeviceMean, DeviceSum):
            for weight in (values, values[0], 0.5, torch.tensor(2.0)):
                stat.update(values, weight)
            stat.update(4.0, values)
            stat.update(4.0, 0.5)
        monitor.end_epoch()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(_floats, max_size=5), max_size=5), st.booleans())
def test_the_same_figures_as_on_the_host(chunks, simulated) -> None:
    monitor = Monitor(ManualClock())
    device = on_device if simulated else lambda tensor: tensor
    stats = [kind(kind.__name__, monitor=monitor) for kind in _STATS]
    exact = monitor.histogram("exact")
    with assert_no_sync():
        for chunk in chunks:
            for stat in stats:
                stat.update(device(torch.tensor(chunk, dtype=torch.float64)))
            for value in chunk:
                exact.add(value)
    reports = {each.definition.name: each for each in monitor.collect().windows}
    if not any(chunks):
        assert not {"DeviceMean", "exact"} & set(reports)
        return
    host = reports["exact"]
    for name in ("DeviceMean", "DeviceSum"):
        report = reports[name]
        assert (report.count, report.num_rejected) == (host.count, host.num_rejected)
        total = host.window.aggregate.total
        assert report.window.aggregate.total == pytest.approx(total, rel=1e-9, abs=1e-6)
    good = [value for chunk in chunks for value in chunk if value >= 0 and value < math.inf]
    assert reports["DeviceCounter"].window.aggregate.total == pytest.approx(sum(good))


@pytest.mark.parametrize("weights", ["tensor", "scalars", "broadcast"])
def test_weighted_means_are_right(monitor, weights) -> None:
    """In this case torchmetrics 1.9 ignores the weights if its NaN check is disabled."""
    stat = DeviceMean("s", monitor=monitor)
    if weights == "tensor":
        stat.update(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0]))
    elif weights == "scalars":
        stat.update(1.0, 3.0)
        stat.update(torch.tensor(3.0), 1)
    else:
        stat.update(torch.tensor([[1.0, 3.0], [1.0, 3.0]]), torch.tensor([3.0, 1.0]))
    (report,) = _windows(monitor, "s")
    assert report.values["mean"] == 1.5


def test_a_number_as_weight_is_not_rounded_to_float32(monitor) -> None:
    """The sums are float64. The weight of a number is then the same as on the host."""
    stat = DeviceMean("s", monitor=monitor)
    with assert_no_sync():
        stat.update(on_device(torch.tensor([1.0, 2.0, math.nan], dtype=torch.float64)), 0.1)
    (report,) = _windows(monitor, "s")
    aggregate = report.window.aggregate
    assert (aggregate.total, aggregate.weight) == (0.1 + 0.2, 0.2)
    assert report.values["mean"] == (0.1 + 0.2) / 0.2


def test_nans_are_counted_and_poison_nothing(monitor) -> None:
    stat = DeviceMean("s", monitor=monitor)
    stat.update(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 5.0, math.nan]))
    stat.update(math.inf)
    (report,) = _windows(monitor, "s")
    assert (report.values, report.count, report.num_rejected) == ({"mean": 1.0, "count": 1}, 1, 3)


def test_a_window_has_the_values_since_the_last_reading(monitor) -> None:
    stat = DeviceSum("s", monitor=monitor)
    found = []
    for value in (1.0, 2.0, 4.0):
        with assert_no_sync():
            stat.update(on_device(torch.tensor([value])))
        stat.update(torch.tensor(value))
        found += [(each.values["sum"], each.count) for each in _windows(monitor, "s")]
    assert found == [(2.0, 2), (4.0, 2), (8.0, 2)]
    assert not _windows(monitor, "s")
    (total,) = (each for each in monitor.collect().totals if each.definition.name == "s")
    assert total.figures.total == 14


def test_an_epoch_ends_where_training_ends_it(monitor) -> None:
    """Also when the reading that carries its last values arrives in the next one."""
    stat = DeviceMean("s", monitor=monitor, window=Window(epoch=True), labels={"task": "click"})
    monitor.step(10)
    stat.update(torch.tensor([1.0]))
    monitor.collect()
    stat.update(torch.tensor([3.0]))
    monitor.end_epoch(1)
    monitor.step(11)
    stat.update(torch.tensor([10.0]))
    (report,) = _windows(monitor, "s")
    assert (report.values["mean"], report.count, report.labels) == (2.0, 2, (("task", "click"),))
    assert (report.window.step, report.window.epoch, report.window.is_partial) == (10, 1, False)
    monitor.end_epoch()
    (report,) = _windows(monitor, "s")
    assert (report.values["mean"], report.window.epoch) == (10.0, 2)


class _NoOperation(TorchDispatchMode):
    """Fails at the first operation on a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_disabled_device_stats_touch_nothing(monitor) -> None:
    for kind in _STATS:
        stat = kind(kind.__name__, monitor=monitor, enabled=False)
        value = torch.tensor(1.0)
        with _NoOperation():
            stat.update(value)
    assert not [each for each in monitor.collect().totals if each.definition.name in {kind.__name__ for kind in _STATS}]


def test_values_in_inference_mode_and_with_gradients(monitor) -> None:
    stat = DeviceMean("s", monitor=monitor)
    with torch.inference_mode():
        stat.update(torch.ones(2))
    loss = torch.ones(2, requires_grad=True) * 2
    stat.update(loss, weight=torch.ones(2, requires_grad=True))
    assert _windows(monitor, "s")[0].values["mean"] == 1.5
    assert not any(vector.requires_grad for vector in stat._vectors.values())


def test_bad_values_are_refused(monitor) -> None:
    stat = DeviceMean("s", monitor=monitor)
    for value, weight in (
        (torch.ones(1, dtype=torch.complex64), 1),
        (torch.ones(3), torch.ones(2)),
        (torch.ones(3), torch.ones(2, 3)),
        (torch.ones(3), on_device(torch.ones(3))),
    ):
        with pytest.raises(InvalidArgumentError):
            stat.update(value, weight)
    assert not _windows(monitor, "s")


# Classification


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_classification_is_that_of_torchmetrics(monitor, average) -> None:
    torch.manual_seed(0)
    ours = DeviceClassification("c", 7, average=average, monitor=monitor)
    kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassRecall, MulticlassF1Score)
    theirs = [kind(7, average=average) for kind in kinds]
    for _ in range(5):
        targets = torch.randint(0, 5, (16,))
        scores = torch.randn(16, 7) + 2 * torch.nn.functional.one_hot(targets, 7)
        with assert_no_sync():
            ours.update(on_device(scores), on_device(targets))
        for metric in theirs:
            metric.update(scores, targets)
    monitor.collect()
    for name, metric in zip(FIGURES, theirs, strict=True):
        assert ours.figures()[name] == pytest.approx(metric.compute().item(), abs=1e-6)


def test_invalid_classes_are_counted(monitor) -> None:
    stat = DeviceClassification("c", 3, monitor=monitor)
    stat.update(torch.tensor([0, 1, 9, 2]), torch.tensor([0, 1, 2, -100]))
    monitor.collect()
    assert stat.figures()["accuracy"] == 1.0
    assert {t.definition.name: t.figures.total for t in monitor.collect().totals}["c.rejected"] == 2
    monitor.end_epoch()
    monitor.collect()
    assert stat.figures() == {}
    with pytest.raises(InvalidArgumentError, match="targets"):
        stat.update(torch.zeros(3), torch.zeros(2))
    for bad in ({"num_classes": 1}, {"num_classes": 2, "average": "weighted"}):
        with pytest.raises(InvalidArgumentError):
            DeviceClassification("d", monitor=monitor, **bad)


# torchmetrics


class _Reduced(torchmetrics.Metric):
    """A sum whose state has another reduction over ranks."""

    def __init__(self, reduction: str | None) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, value) -> None:
        self.total += value

    def compute(self):
        return self.total


def _values(monitor, name):
    return {each.labels[0][1]: each.values["value"] for each in _windows(monitor, name)}


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
def test_metrics_of_torchmetrics_are_read(monitor) -> None:
    made = {
        "sum": (torchmetrics.SumMetric(), 6.0),
        "max": (torchmetrics.MaxMetric(), 3.0),
        "min": (torchmetrics.MinMetric(), 1.0),
        "mean": (torchmetrics.MeanMetric(), 2.0),
    }
    stats = {name: TorchMetric(name, metric, monitor=monitor) for name, (metric, _) in made.items()}
    median = TorchMetric("cat", torchmetrics.SpearmanCorrCoef(), monitor=monitor)
    for value in (1.0, 2.0, 3.0):
        for stat in stats.values():
            stat.update(torch.tensor(value))
        median.update(torch.tensor([value, -value]), torch.tensor([value * 2, -value]))
    collection = monitor.collect()
    values = {each.definition.name: each.values["value"] for each in collection.windows}
    assert {name: values[name] for name in made} == {name: exact for name, (_, exact) in made.items()}
    assert values["cat"] == pytest.approx(median.metric.compute().item())
    assert not _values(monitor, "sum"), "nothing new"
    stats["sum"].reset()
    assert not _values(monitor, "sum"), "nothing at all"
    stats["sum"].update(5.0)
    assert _values(monitor, "sum") == {"value": 5.0}


@pytest.mark.parametrize("reduction", ["mean", None])
def test_a_metric_with_any_reduction_is_read(monitor: Monitor, reduction: str | None) -> None:
    stat = TorchMetric("m", _Reduced(reduction), monitor=monitor)
    for value in (1.0, 2.0):
        stat.update(torch.tensor(value))
    assert _values(monitor, "m") == {"value": 3.0}


def test_merged_over_ranks(two_ranks: RankPool) -> None:
    answers = two_ranks.run(f"{_CASES}:merged")
    assert answers[0] == answers[1]
    assert answers[0]["metric max"] == 8.0
    assert answers[0]["metric mean"] == pytest.approx(5.5)
    assert answers[0]["metric cat"] == pytest.approx(answers[0]["exact cat"])


def test_a_merge_over_ranks_takes_no_reading_from_the_collector(two_ranks: RankPool) -> None:
    for rank, answer in enumerate(two_ranks.run(f"{_CASES}:merged_before_a_reading")):
        assert answer == {"merged": 30.0, "own": [{"value": 10.0 * (rank + 1)}, {}]}


class _Kept(torchmetrics.Metric):
    """It keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("newest", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("every", [], dist_reduce_fx="cat")

    def update(self, value) -> None:
        self.newest = value
        self.every.append(value[None])

    def compute(self):
        return self.newest + torch.cat(self.every).sum()


def test_a_metric_keeps_neither_the_values_nor_their_graph(monitor) -> None:
    stat = TorchMetric("m", _Kept(), monitor=monitor)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    gone = weakref.ref(loss)
    stat.update(loss)
    del loss
    assert gone() is None
    value = torch.tensor(4.0)
    stat.update(value=value)
    value += 100
    assert _values(monitor, "m") == {"value": 4 + 3 + 4}
    tensors = [stat.metric.newest, *stat.metric.every]
    assert not any(each.requires_grad for each in tensors)


class _Counting(torchmetrics.SumMetric):
    """It counts outside of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def update(self, value) -> None:
        super().update(value)
        self.num_seen += 1

    def compute(self):
        return self.sum_value / max(self.num_seen, 1)


class _Listed(_Counting):
    """It counts in a list, and later in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total = [], torch.zeros(2)

    def update(self, value) -> None:
        if self.seen:
            self.total[0] += 1
        else:
            self.seen.append(1)


class _Holding(torchmetrics.SumMetric):
    """It hides a metric in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"list": [torchmetrics.SumMetric()]}


def test_metrics_with_values_outside_of_their_states_are_refused(monitor) -> None:
    with pytest.raises(InvalidArgumentError, match="inner metrics: SumMetric"):
        TorchMetric("hidden", _Holding(), monitor=monitor)
    stat = TorchMetric("m", _Counting(), monitor=monitor)
    with pytest.raises(InvalidArgumentError, match="Declare 'num_seen'"):
        stat.update(3.0)
    with pytest.raises(InvalidArgumentError, match="Declare 'seen'"):
        TorchMetric("listed", _Listed(), monitor=monitor).update(3.0)
    later = _Listed()
    later.seen = [1]
    with pytest.raises(InvalidArgumentError, match="Declare 'total'"):
        TorchMetric("later", later, monitor=monitor).update(3.0)
    monitor.collect()
    assert not _values(monitor, "m")


def test_a_metric_starts_no_collective_in_the_collector(two_ranks: RankPool) -> None:
    """It would interleave with those of training, in another order on every rank."""
    answers = two_ranks.run(f"{_CASES}:metrics_during_training")
    for answer in answers:
        assert set(answer["own"].values()) == {2**53 + 1}
        assert set(answer["merged"].values()) == {2 * (2**53 + 1)}
        assert answer["errors"] == 0
        assert answer["readings"] > 1
        assert answer["threads"] == ["MainThread"]


@pytest.mark.parametrize(
    "metric",
    [
        torchmetrics.MinMaxMetric(torchmetrics.SumMetric()),
        torchmetrics.SumMetric() + torchmetrics.SumMetric(),
        torchmetrics.MetricCollection([torchmetrics.SumMetric()]),
        torch.nn.Linear(1, 1),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_metrics_whose_states_are_elsewhere_are_refused(monitor, metric) -> None:
    with pytest.raises(InvalidArgumentError, match="metric"):
        TorchMetric("m", metric, monitor=monitor)
    assert not monitor.find("m")


@pytest.mark.parametrize("kind", _STATS)
def test_a_stat_that_is_deleted_is_read_once_more_and_freed(monitor: Monitor, kind: type[DeviceMean]) -> None:
    stat = kind("s", monitor=monitor)
    stat.update(torch.tensor([1.0, 2.0]))
    monitor.collect()
    stat.update(torch.tensor([3.0]))
    alive = weakref.ref(stat)
    del stat
    counts = [window.values.get("count", window.values.get("sum")) for window in _windows(monitor, "s")]
    assert counts == [3.0 if kind is DeviceCounter else 1]
    assert alive() is None
    for number in range(1, 20):  # a new stat may have the same address
        kind("s", monitor=monitor).update(torch.ones(number))
        counts = [window.values.get("count", window.values.get("sum")) for window in _windows(monitor, "s")]
        assert counts == [number]


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_stat_that_is_deleted_is_read_after_a_copy_that_failed(monitor: Monitor, num_failures: int) -> None:
    stats = [DeviceSum(name, monitor=monitor) for name in ("kept", "s")]
    for number in (1.0, 2.0):
        for stat in stats:
            stat.update(torch.tensor([number]))
        if number == 1.0:
            monitor.collect()
    alive = weakref.ref(stats.pop())
    del stat
    reader = reader_of(monitor)
    with mock.patch("delta_tracker.monitor.device.device_state._start_copy", side_effect=MemoryError("pinned")):
        for _ in range(num_failures):
            with pytest.raises(MemoryError):
                reader.read(is_last=False)
    reader.read(is_last=False)
    windows = {each.definition.name: each.values.get("sum") for each in monitor.collect().windows}
    assert (windows.get("kept"), windows.get("s")) == (2.0, 2.0)
    gc.collect()  # the errors hold frames
    assert alive() is None


def test_a_metric_that_is_deleted_is_read_once_more_and_freed(monitor: Monitor) -> None:
    stat = TorchMetric("m", torchmetrics.SumMetric(), monitor=monitor)
    stat.update(1.0)
    assert [window.values["value"] for window in _windows(monitor, "m")] == [1.0]
    alive = weakref.ref(stat.metric)
    stat.update(2.0)
    del stat
    assert [window.values["value"] for window in _windows(monitor, "m")] == [3.0]
    gc.collect()
    assert alive() is None
    TorchMetric("other", torchmetrics.SumMetric(), monitor=monitor)  # removes the sources that have ended
    assert "m" not in [source.name for source in monitor.registry.sources]


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_a_metric_that_replaces_a_deleted_one_loses_none_of_its_updates(
    monitor: Monitor, *, is_deleted_first: bool
) -> None:
    alive = []
    stat: TorchMetric | None = None
    for number in range(1, 4):
        if is_deleted_first:
            stat = None
        stat = TorchMetric("m", torchmetrics.SumMetric(), monitor=monitor)
        stat.update(float(number))
        alive.append(weakref.ref(stat))
    aggregates = [window.window.aggregate for window in _windows(monitor, "m")]
    assert [(each.count, each.total) for each in aggregates] == [(3, 6.0)]
    assert [window.values["value"] for window in _windows(monitor, "m")] in ([], [3.0])
    gc.collect()
    assert [each() for each in alive] == [None, None, stat]
    stat.update(4.0)
    assert [window.values["value"] for window in _windows(monitor, "m")] == [7.0]


class _Total(torchmetrics.Metric):
    """Weighted sum of values on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(4), "sum")

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total.to(values.device)
        self.total *= 2  # the order of updates counts
        self.total += values

    def compute(self) -> torch.Tensor:
        return self.total.sum()


@pytest.mark.parametrize(
    ("index", "aside"),
    [(0, False), (0, True), (1, False)],
    ids=["same stream", "another stream", "another device"],
)
@pytest.mark.parametrize("num_updates", [1, 4])
def test_a_metric_is_read_after_the_updates_of_any_stream(num_updates: int, index: int, aside: bool) -> None:
    for seed in range(6):
        monitor = Monitor(ManualClock())
        stat = TorchMetric("m", _Total(), monitor=monitor)
        with fake_streams(seed, num_devices=2):
            device = torch.device("cuda", index)
            streams = [torch.cuda.Stream(device) if aside else torch.cuda.default_stream(device) for _ in range(2)]
            for number in range(num_updates):
                with torch.cuda.stream(streams[number % 2]):
                    stat.update(torch.full((4,), float(number + 1), device=device))
            stat.read(is_last=True)
            assert [window.values["value"] for window in _windows(monitor, "m")] == [
                4.0 if num_updates == 1 else 4.0 * (8 + 2 * 4 + 3 * 2 + 4)
            ]


def test_sums_are_read_after_the_updates_of_any_stream() -> None:
    for seed in range(6):
        monitor = Monitor(ManualClock())
        stat, other = (DeviceSum(name, monitor=monitor) for name in ("s", "other"))
        with fake_streams(seed) as devices:
            streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
            found = []
            for number in range(6):
                with torch.cuda.stream(streams[number * number % 3]):
                    for each in (stat, other):
                        each.update(torch.full((4,), float(number), device="cuda"))
                if number % 2:
                    assert devices.num_waits == 0
                    reader_of(monitor).begin()
                    reader_of(monitor).finish(wait=True)
                    found += [window.values["sum"] for window in _windows(monitor, "s")]
                    devices.num_waits = 0
            assert sum(found) == 4 * 15
