"""Device stats: correct values, no sync, counted NaNs, and exact ends of epochs."""

from __future__ import annotations

import gc
import math
import weakref
from unittest import mock

import pytest
import torch
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
from tests.fake_streams.simulation import fake_streams
from tests.monitor.clocks import ManualClock
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
