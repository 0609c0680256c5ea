"""Calls of a publisher that are interrupted at any line lose no row, and the same call completes the version."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import delta_tracker
from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher
from tests.publisher import versions_cases
from tests.publisher.versions_cases import Interrupt
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE

_PACKAGE = Path(delta_tracker.__file__).parent
_FILES = tuple(
    str(_PACKAGE / f"publisher/{name}.py") for name in ("versions", "exchange", "delivery", "host_copies", "reports")
)


class _Job:
    """A small trainer with its publisher and a predictor."""

    def __init__(self, url: Path) -> None:
        self.model = nn.Sequential(nn.EmbeddingBag(20, 2, sparse=True))
        self.tracker = ModelDeltaTracker(self.model)
        self._url = url
        self._threads = set(threading.enumerate())
        self.open()
        self.publisher.publish()
        self.served = torch.full((20, 2), torch.nan)
        self.predictor = Predictor({"0": self.served}, url)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._row = 0

    def open(self) -> None:
        self.publisher = Publisher(self.tracker, self._url, cadence=Cadence(batches=1))

    def train(self) -> None:
        self._row = (self._row + 1) % 20
        self._optimizer.zero_grad()
        self.model(torch.tensor([[self._row]])).sum().backward()
        self._optimizer.step()
        self.tracker.step()

    def interrupted(self, call: str, number: int, paths: tuple[str, ...]) -> bool:
        """Interrupt a call at a line; return False if it ended before."""
        interrupt = Interrupt(number, paths)
        sys.settrace(interrupt)
        try:
            getattr(self.publisher, call)()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return bool(interrupt.place)

    def assert_served(self) -> None:
        self.predictor.sync()
        assert torch.equal(self.served, self.model[0].weight.detach())

    def close(self) -> None:
        """Close the publisher, which leaves nothing behind."""
        self.publisher.close()
        assert self.tracker.consumers == ("default",)
        assert set(threading.enumerate()) <= self._threads


def _at_each_line(url: Path, call: str, then: Callable[[_Job], None], paths: tuple[str, ...] = _FILES) -> int:
    """Interrupt ``call`` at each of its lines in turn, or each fifth, do ``then``, and return the number of lines."""
    job, number = _Job(url), 0
    job.assert_served()
    try:
        while True:
            job.train()
            if not job.interrupted(call, number, paths):
                return number
            then(job)
            assert torch.is_grad_enabled()
            number += 1 if SWEEPS_ARE_WHOLE else 5
    finally:
        job.close()
        job.tracker.detach()


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


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless")
def test_the_next_close_frees_what_an_interrupted_one_did_not(tmp_path: Path) -> None:
    def again(job: _Job) -> None:
        job.close()
        job.open()
        job.publisher.publish()
        job.assert_served()

    assert _at_each_line(tmp_path, "close", again, (str(_PACKAGE),)) > 20


def _on_two_ranks(pool: RankPool, path: Path, step: int = 1, **choices: Any) -> list[str]:
    """Interrupt a rank at each line of some calls, or at a few; return the lines at which it was lost."""
    url, every = f"file://{path}/stream", step if SWEEPS_ARE_WHOLE else 150
    case = f"{versions_cases.__name__}:at_each_line"
    first, second = pool.run(case, url=url, choices={"every": every, **choices}, timeout_seconds=1700)
    assert first == second
    assert first["num_lines"] > 80 / every
    return list(first["lost"])


@pytest.mark.sweep("long")
@pytest.mark.timeout(1800)
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("calls", ["publish", "snapshot", "step flush", "step step step step step", "step close"])
def test_the_same_call_continues_with_the_other_ranks(
    two_ranks: RankPool, tmp_path: Path, calls: str, victim: int
) -> None:
    """Only an interrupt before a call of step() counts, or that leaves open whether a vote was sent, loses the rank."""
    for place in _on_two_ranks(
        two_ranks, tmp_path, calls=calls.split(), then="again", victim=victim, timeout_seconds=15
    ):
        assert place.endswith((" start_all_gather", " step", " _checked", " has_cadence", " call"))


@pytest.mark.sweep("long")
@pytest.mark.timeout(1800)
@pytest.mark.promise("lossless")
def test_an_interrupt_outside_a_selection_of_rows_loses_no_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    choices = {"calls": ["publish"], "then": "again", "victim": 1, "has_top_k": True, "timeout_seconds": 4}
    for place in _on_two_ranks(two_ranks, tmp_path, **choices):
        assert place.startswith("rank_group.py"), place


@pytest.mark.sweep("long", only=True)
@pytest.mark.timeout(1800)
@pytest.mark.promise("lossless")
@pytest.mark.parametrize("then", ["close", "later"])
@pytest.mark.parametrize("call", ["publish", "snapshot", "flush"])
def test_other_ranks_wait_for_an_interrupted_one_within_the_timeout(
    two_ranks: RankPool, tmp_path: Path, call: str, then: str
) -> None:
    _on_two_ranks(two_ranks, tmp_path, calls=[call], then=then, victim=1, step=20, timeout_seconds=8)
