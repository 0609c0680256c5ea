"""After a lookup is captured in a CUDA graph, all rows count as changed, so that no update of a replay is lost."""

from __future__ import annotations

import pytest
import torch

from benchmarks.plain_torchrec import Features, PlainModel
from delta_tracker import ModelDeltaTracker
from delta_tracker.monitor.device.metrics import DeviceSum
from delta_tracker.monitor.monitor import Monitor
from tests.gpu.devices import OF_MODULES, needs

pytestmark = [needs("graphs"), pytest.mark.usefixtures("plain_torchrec")]


def test_replays_of_a_captured_step_lose_no_update() -> None:
    model = PlainModel({"t": (1000, 8)}, OF_MODULES)
    features = Features({"t": torch.arange(100, device=OF_MODULES)})
    with ModelDeltaTracker(model) as tracker:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch.cuda.graphs asks for
            for _ in range(3):
                model(features).backward()
        torch.cuda.current_stream().wait_stream(side)
        tracker.get_delta()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(features).backward()
        for begin in (100, 300):
            before = model.weights()["ec.embeddings.t"].clone()
            features.values().copy_(torch.arange(begin, begin + 100, device=OF_MODULES))
            graph.replay()
            torch.cuda.synchronize()
            changed = (model.weights()["ec.embeddings.t"] != before).any(dim=1).nonzero().flatten()
            assert changed.tolist() == list(range(begin, begin + 100))
            assert len(tracker.get_delta()["ec.embeddings.t"]) == 1000
        assert tracker.num_hook_errors == 0


def test_replays_of_a_captured_update_of_a_metric_are_counted() -> None:
    monitor = Monitor()
    stat, value = DeviceSum("s", monitor=monitor), torch.ones(4, device=OF_MODULES)
    stat.update(value)  # allocates the sums
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stat.update(value)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert [window.values["sum"] for window in monitor.collect().windows] == [16.0]
