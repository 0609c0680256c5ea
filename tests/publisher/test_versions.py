"""Calls of a publisher that are interrupted at any line lose no row, and the same call completes the version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher
from tests.sweeps import SWEEPS_ARE_WHOLE

_FILES = tuple(f"publisher/{name}.py" for name in ("versions", "ballots", "delivery", "host_copies", "reports"))


class _Interrupt:
    """Trace function that raises KeyboardInterrupt once, before the line of a number, in the publisher's files."""

    def __init__(self, number: int) -> None:
        self.is_raised = False
        self._num_left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(_FILES):
            return None
        if event == "line" and not self.is_raised:
            self._num_left -= 1
            if self._num_left < 0:
                self.is_raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


class _Job:
    """A small trainer with its publisher and a predictor."""

    def __init__(self, url: Path) -> None:
        self.model = nn.Sequential(nn.EmbeddingBag(20, 2, sparse=True))
        self.tracker = ModelDeltaTracker(self.model)
        self.publisher = Publisher(self.tracker, url, cadence=Cadence(batches=1), pointer_seconds=None)
        self.publisher.publish()
        self.served = torch.full((20, 2), torch.nan)
        self.predictor = Predictor({"0": self.served}, url)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._row = 0

    def train(self) -> None:
        self._row = (self._row + 1) % 20
        self._optimizer.zero_grad()
        self.model(torch.tensor([[self._row]])).sum().backward()
        self._optimizer.step()
        self.tracker.step()

    def interrupted(self, call: str, number: int) -> bool:
        """Interrupt a call at a line; return False if it ended before."""
        interrupt = _Interrupt(number)
        sys.settrace(interrupt)
        try:
            getattr(self.publisher, call)()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return interrupt.is_raised

    def assert_served(self) -> None:
        self.predictor.sync()
        assert torch.equal(self.served, self.model[0].weight.detach())

    def close(self) -> None:
        self.publisher.close()
        self.tracker.detach()


def _at_each_line(url: Path, call: str, then: Callable[[_Job], None]) -> int:
    """Interrupt ``call`` at each of its lines in turn, or each fifth, do ``then``, and return the number of lines."""
    job, number = _Job(url), 0
    job.assert_served()
    try:
        while True:
            job.train()
            if not job.interrupted(call, number):
                return number
            then(job)
            assert torch.is_grad_enabled()
            number += 1 if SWEEPS_ARE_WHOLE else 5
    finally:
        job.close()


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("call", ["publish", "snapshot", "flush"])
def test_the_same_call_completes_the_version(tmp_path: Path, call: str) -> None:
    def again(job: _Job) -> None:
        before = job.predictor.version
        getattr(job.publisher, call)()
        assert job.publisher.error is None
        assert job.publisher.version == before + 1
        job.assert_served()

    assert _at_each_line(tmp_path, call, again) > 40


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("call", ["step", "publish", "snapshot", "flush"])
def test_a_later_call_publishes_all_rows(tmp_path: Path, call: str) -> None:
    def later(job: _Job) -> None:
        job.train()
        job.publisher.publish()
        job.assert_served()

    assert _at_each_line(tmp_path, call, later) > 20
