"""Time for which one publish holds the change log's lock, by tracking mode: ``python -m benchmarks.time_lock``.

The hooks of the training thread acquire this lock, too. Each round changes the same rows of one table in each mode, on
one rank, and publishes them to a local directory; the modes take turns in a random order. ``held`` is the total time
for which any thread held the lock during the publish, ``longest`` the longest single time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from benchmarks.harness import Figures, interleaved
from benchmarks.ids import distinct_ids
from benchmarks.workloads import Trainer, one_rank, tables
from delta_tracker import ModelDeltaTracker, Publisher, TrackingMode

_MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)
_DIM = 64


class TimedLock:
    """A reentrant lock that records how long it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._since = 0.0
        self.seconds: list[float] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  as threading's
        """Acquire the lock, as ``threading.RLock.acquire`` does."""
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        if self._depth == 1:
            self._since = time.perf_counter()
        return True

    def release(self) -> None:
        """Release the lock, as ``threading.RLock.release`` does."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds.append(time.perf_counter() - self._since)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Case:
    """A trainer in one tracking mode, with its publisher."""

    def __init__(self, mode: TrackingMode, root: Path, num_rows: int) -> None:
        self._trainer = Trainer(tables(1, num_rows, _DIM))
        self._tracker = ModelDeltaTracker(self._trainer.model, mode=mode)
        self._root = root / mode.value
        self._publisher = Publisher(self._tracker, self._root.as_uri())
        self._publisher.publish()
        self._lock = self._tracker._log.lock = TimedLock()  # type: ignore[assignment]  # noqa: SLF001  to watch it

    def publish(self, ids: torch.Tensor) -> Figures:
        self._trainer.train(ids, self._tracker)
        self._lock.seconds.clear()
        begin = time.perf_counter()
        manifest = self._publisher.publish()
        seconds = time.perf_counter() - begin
        assert manifest.num_rows == len(ids), "the version holds other rows"
        shutil.rmtree(self._root / "parts")  # never read
        return {"held": sum(self._lock.seconds), "longest": max(self._lock.seconds), "publish": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_lock")
    parser.add_argument("--rows", type=int, default=100_000, help="number of rows that change")
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    num_rows = 10 * arguments.rows
    ids = distinct_ids(num_rows, arguments.rows, torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as directory, one_rank():
        cases = {mode: _Case(mode, Path(directory), num_rows) for mode in _MODES}
        found = interleaved(
            {mode.value: lambda case=case: case.publish(ids) for mode, case in cases.items()},  # type: ignore[misc]
            repeats=arguments.repeats,
            warmups=3,
        )
    sys.stdout.write(f"{arguments.rows} of {num_rows} rows x {_DIM} fp32, milliseconds: median (smallest-largest)\n\n")
    sys.stdout.write("| mode | held | longest | publish |\n|---|---|---|---|\n")
    for name, figures in found.items():
        cells = " | ".join(figures[figure].text(1000, 2) for figure in ("held", "longest", "publish"))
        sys.stdout.write(f"| {name} | {cells} |\n")


if __name__ == "__main__":
    main()
