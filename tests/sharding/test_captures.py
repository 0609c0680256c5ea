"""While a CUDA graph is captured, hooks launch no operation, and the captured stream waits for no other stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.watcher import HookContext
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.fake_streams.cached_kernel import CachedKernel
from tests.fake_streams.cuda import FakeStream
from tests.fake_streams.simulation import fake_streams
from tests.sharding.capture_cases import Ops, capture
from tests.sharding.fake_collections import Ids, Lookups


def test_a_captured_stream_waits_for_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def wait_stream(stream: Any, other: Any, wait: Callable[..., None] = FakeStream.wait_stream) -> None:
        waits.append((stream, other))
        wait(stream, other)

    with fake_streams(0) as devices:
        log = ChangeLog({"t": SegmentStore(8, "cuda", engine="torch")}, ["a"], delete_on_read=True, max_bytes=None)
        module = Lookups(CachedKernel(torch.zeros(8, 2), 4), lambda _: None)
        context = HookContext(log.writes, Recorder("tracker", log, monitor=Monitor()))
        hook = PostLookupHook(Kernel(module, (("t", 1),), is_fused=True), context, lookups=False)

        def train(ids: list[int]) -> None:
            found = module(Ids.of(ids).to("cuda", non_blocking=True))
            found.grad_fn.register_hook(module.leave)
            found.sum().backward()

        train([1, 2])
        side: Any = devices.stream()
        side.wait_stream(torch.cuda.current_stream())
        monkeypatch.setattr(FakeStream, "wait_stream", wait_stream)
        with torch.cuda.stream(side), capture():
            train([3])
        assert all(stream == other for stream, other in waits)
        torch.cuda.current_stream().wait_stream(side)
        read = log.consumers.read("a")
        assert len(read.rows["t"]) == 8, "replays call no hook"
        assert hook.num_errors == 0
        hook.remove()


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _step_with_closure(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("step", [_step, _step_with_closure])
def test_a_captured_step_of_an_optimizer_has_no_operation_of_a_tracker(step: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True))
    (weight,) = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight.grad = torch.ones_like(weight)
    with Ops() as alone:
        for _ in range(2):
            step(optimizer)
    with ModelDeltaTracker(model, engine="torch") as tracker:
        with capture(), Ops() as captured:
            for _ in range(2):
                step(optimizer)
        assert captured.num_ops == alone.num_ops
        for _ in range(2):
            assert len(tracker.get_delta()["0"]) == 8
        assert tracker.num_hook_errors == 0


def test_a_captured_step_of_other_parameters_marks_no_row() -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 3))
    dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    with ModelDeltaTracker(model) as tracker:
        with capture():
            dense.step()
        assert len(tracker.get_delta()["0"]) == 0
