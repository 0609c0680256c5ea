"""Number of calls of the library's functions in one warm publish and one warm sync.

Run it as ``python -m benchmarks.count_calls``. A call is a ``call`` event of Python's profiler whose code is in the
package ``delta_tracker``. Functions, lambdas, comprehensions (which have their own frame in Python 3.11) and each
resumption of a generator count as one call. C functions and other packages are not counted. Events of all threads
count, through ``threading.setprofile`` and ``sys.setprofile``.

The workload is one rank without a monitor, one table of 1,000 x 64 fp32 rows in ``ID_ONLY`` mode, and a stream in a
local directory. Each round trains one batch of 100 rows, ``publish()`` writes them as one version, and ``sync()`` of a
predictor in the same process applies it. The first rounds are warm-up. The number of calls is the same in every warm
round: the clock stops and no garbage is collected while calls are counted, and the pointer object is written once,
before the first ``sync()``. Times are measured in other rounds, without the profiler.

Use ``--show NAME`` to list the functions that are called.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from unittest import mock

import torch

import delta_tracker
from benchmarks.ids import distinct_ids
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TrackingMode, Upkeep
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.reading.runtime import Runtime

_PACKAGE = str(Path(delta_tracker.__file__).parent) + "/"
_NUM_ROWS, _DIM, _NUM_IDS = 1000, 64, 100
_WARMUPS = 5
_PATIENCE_SECONDS = 60.0


class CallCounter:
    """Counts the calls of ``delta_tracker``'s functions in all threads that start while :meth:`installed`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_counting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread and those that start inside the context."""
        before = sys.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def count(self, work: Callable[[], object]) -> Counter[str]:
        """Return how often each function is called until ``work`` returns, by file, line and name."""
        self._counts = Counter()
        self._is_counting = True
        work()
        self._is_counting = False
        return self._counts

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_counting and event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            code = frame.f_code
            name = f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"
            self._counts[name] += 1


class Rounds:
    """A trainer, its publisher and a predictor, which repeat the same steps. Needs a process group.

    Args:
        root: an empty directory for the stream.
        mode: tracking mode.
    """

    def __init__(self, root: Path, mode: TrackingMode = TrackingMode.ID_ONLY) -> None:
        self._trainer = Trainer(tables(1, _NUM_ROWS, _DIM))
        (self._table,) = self._trainer.tables
        self._tracker = ModelDeltaTracker(self._trainer.model, mode=mode)
        self._pointer = root / POINTER_NAME
        self._publisher = Publisher(self._tracker, root.as_uri(), upkeep=Upkeep(pointer_seconds=3600.0))
        self._held = {self._trainer.fqn(self._table): torch.zeros(_NUM_ROWS, _DIM)}
        runtime = Runtime(monotonic=lambda: time.monotonic())  # noqa: PLW0108  the one that is stopped
        self._predictor = Predictor(self._held, root.as_uri(), runtime=runtime)
        self._generator = torch.Generator().manual_seed(0)

    def run(self, measure: Callable[[str, Callable[[], object]], object]) -> None:
        """Train a batch, publish and sync; ``measure`` is called with the name of a step and must run its function."""
        self._trainer.train(distinct_ids(_NUM_ROWS, _NUM_IDS, self._generator), self._tracker)
        measure("publish", self._publisher.publish)
        self._await_pointer()
        measure("sync", self._predictor.sync)
        assert self._predictor.version == self._publisher.version
        (view,) = self._tracker.live.column_views(self._trainer.fqn(self._table))
        assert torch.equal(self._held[self._trainer.fqn(self._table)], view), "the predictor has other rows"

    def _await_pointer(self) -> None:
        """Wait for the first pointer object: a thread writes it, and a sync without one lists the log."""
        end = time.perf_counter() + _PATIENCE_SECONDS
        while not self._pointer.exists():
            assert time.perf_counter() < end, "the pointer object is missing"
            time.sleep(0.001)

    def close(self) -> None:
        """Close the publisher and detach the tracker."""
        self._publisher.close()
        self._tracker.detach()


def count_calls(
    root: Path, *, repeats: int, mode: TrackingMode = TrackingMode.ID_ONLY
) -> dict[str, list[Counter[str]]]:
    """Return the calls of each repeat, by ``publish`` and ``sync``. Needs a process group of one rank.

    Args:
        root: an empty directory.
        repeats: number of counted rounds.
        mode: tracking mode.
    """
    counter = CallCounter()
    found: dict[str, list[Counter[str]]] = {"publish": [], "sync": []}
    with counter.installed(), _without_clock_or_garbage():
        rounds = Rounds(root, mode)
        for _ in range(_WARMUPS):
            rounds.run(lambda _, work: work())
        for _ in range(repeats):
            rounds.run(lambda name, work: found[name].append(counter.count(work)))
        rounds.close()
    return found


@contextmanager
def _without_clock_or_garbage() -> Iterator[None]:
    """Stop the clock of the library, which repeats some reads after a second, and the collection of garbage."""
    now = time.monotonic()
    gc.disable()
    try:
        with mock.patch("time.monotonic", return_value=now):
            yield
    finally:
        gc.enable()


def measure_seconds(root: Path, *, repeats: int) -> dict[str, list[float]]:
    """Return the elapsed seconds of each repeat, by ``publish`` and ``sync``. Needs a process group of one rank.

    Args:
        root: an empty directory.
        repeats: number of timed rounds.
    """
    found: dict[str, list[float]] = {"publish": [], "sync": []}

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        found[name].append(time.perf_counter() - begin)

    rounds = Rounds(root)
    for _ in range(_WARMUPS):
        rounds.run(lambda _, work: work())
    for _ in range(repeats):
        rounds.run(timed)
    rounds.close()
    return found


def total(calls: Sequence[Mapping[str, int]]) -> int:
    """Return the number of calls, which must be the same in each round."""
    (number,) = {sum(each.values()) for each in calls}
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Count, time and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.count_calls")
    parser.add_argument("--repeats", type=int, default=200, help="how many rounds are timed")
    parser.add_argument("--show", choices=["publish", "sync"], help="list the functions that it calls")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, one_rank():
        calls = count_calls(Path(directory) / "counted", repeats=5)
        seconds = measure_seconds(Path(directory) / "timed", repeats=arguments.repeats)
    if arguments.show is not None:
        for name, count in calls[arguments.show][-1].most_common():
            sys.stdout.write(f"{count:4d} {name}\n")
    figures = {
        name: {"calls": total(each), "median_ms": round(1000 * statistics.median(seconds[name]), 3)}
        for name, each in calls.items()
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
