"""Device metrics on the device: updates do not wait for it, and readings are exact."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.device.classification import DeviceClassification
from delta_tracker.monitor.device.metrics import DeviceCounter, DeviceMean, DeviceSum
from tests.gpu.devices import needs, no_sync, put

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def test_updates_do_not_wait() -> None:
    monitor = Monitor()
    stats = [kind(kind.__name__, monitor=monitor) for kind in (DeviceMean, DeviceSum, DeviceCounter)]
    classes = DeviceClassification("classes", 10, monitor=monitor)
    numbers = torch.rand(100, generator=torch.Generator().manual_seed(0))
    values, scores, targets = put(numbers), put(torch.rand(8, 10)), put(torch.arange(8))
    for stat in stats:
        stat.update(values[:0])  # the first one may allocate
    classes.update(scores[:0], targets[:0])
    with no_sync():
        for _ in range(3):
            for stat in stats:
                for value in (values, values[0], 1.5, torch.tensor(2.0)):
                    stat.update(value)
            stats[0].update(values, values)
            stats[0].update(values, torch.tensor(2.0))
            classes.update(scores, targets)
            monitor.end_epoch()
    reports = {each.definition.name: each for each in monitor._collector.collect(is_last=True).windows}
    assert reports["DeviceSum"].values["sum"] == pytest.approx(3 * (float(numbers.sum() + numbers[0]) + 3.5), rel=1e-5)


@needs("streams")
def test_readings_are_exact_while_another_stream_records() -> None:
    monitor = Monitor()
    stat = DeviceSum("s", monitor=monitor, window=Window(epoch=True))
    streams = [torch.cuda.Stream() for _ in range(3)]
    one = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    for number in range(300):
        with torch.cuda.stream(streams[number % 3]):
            stat.update(one)
        if number % 50 == 49:
            monitor.collect()
    monitor.end_epoch()
    (report,) = (each for each in monitor._collector.collect(is_last=True).windows if each.definition.name == "s")
    assert (report.values["sum"], report.count) == (300, 300)
