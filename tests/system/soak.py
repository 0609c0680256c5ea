"""Training, publishing, following, forking and collecting in one process: ``python -m tests.system.soak --seconds 60``.

Every lock is acquired under a watchdog. Fails if a thread waits longer than a second for a lock, if a forked child
hangs or sees a torn row, if a thread or a child is left at the end, or if the predictor then differs from the trainer.
Prints counts as JSON.
"""

# ruff: noqa: E402  the library is imported under the watchdog
from __future__ import annotations

from tests.system import watched_locks

_WAITS = watched_locks.install(limit_seconds=5.0)

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, TrackingMode, Upkeep
from delta_tracker.monitor import MONITOR
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.maintenance.retention import Retention
from tests.models import Spec, batch, shard

_CHILD_SECONDS = 60
_JOIN_SECONDS = 60.0
_NUM_READERS = 2
_NUM_LOOKUPS = 20


class Soak:
    """One process that trains, publishes, follows, forks and collects concurrently.

    Args:
        root: an empty folder.
        seed: random seed of the batches and of the times of forks.
        children: actions of forked children, of ``load`` and ``serve``.
    """

    def __init__(self, root: Path, seed: int, children: Sequence[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._draw = random.Random(seed)
        self._actions = [{"load": self._load, "serve": self._serve}[each] for each in children]
        self._generator = torch.Generator().manual_seed(seed)
        self._spec = Spec.every_sharding(1)
        self._model = shard(self._spec)
        self._tracker = ModelDeltaTracker(self._model, mode=TrackingMode.EMBEDDING)
        url = f"file://{root}/stream"
        self._publisher = Publisher(
            self._tracker,
            url,
            cadence=Cadence(batches=2, snapshot_every=10),
            upkeep=Upkeep(retention=Retention(versions=20, grace_seconds=0.5), compact_every=5),
        )
        self._served: dict[str, Tensor] = {
            fqn: torch.full((table.num_rows, table.dim), -1.0) for fqn, table in self._tracker.tables.items()
        }
        self._predictor = Predictor(ModelTarget(self._served, chunk_rows=2), url, name="soak")
        sinks = [JsonlSink(str(root / "figures.jsonl")), ChromeTraceSink(str(root / "trace.json"))]
        MONITOR.start(sinks, interval=timedelta(milliseconds=20))
        self._publisher.publish()
        self._predictor.follow(poll_seconds=0.01)
        self._is_done = threading.Event()
        self._readers = [threading.Thread(target=self._read, name=f"soak-{number}") for number in range(_NUM_READERS)]

    def run(self, seconds: float) -> None:
        """Train for some seconds and some versions, forks and lookups; stop everything."""
        for thread in self._readers:
            thread.start()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end or self._is_too_short():
                self._train()
                if self._draw.random() < 0.05:
                    self._fork(self._draw.choice(self._actions))
        finally:
            self._is_done.set()
            for thread in self._readers:
                thread.join()
        self._end()

    def _is_too_short(self) -> bool:
        num_forks = self.counts["forks: load"] + self.counts["forks: serve"]
        return num_forks < 2 or self.counts["lookups"] < 20 or (self._predictor.version or 0) < 4

    def _train(self) -> None:
        with MONITOR.span("soak.batch"):
            self._model(batch(self._spec, self._generator)).backward()
        self._tracker.step()
        self._publisher.step()
        self.counts["batches"] += 1

    def _read(self) -> None:
        """Look rows up during apply, and fork while the training thread may hold any lock."""
        draw = random.Random(threading.current_thread().name)
        while not self._is_done.is_set():
            is_applying = self._look_up()
            self.counts["lookups"] += 1
            if draw.random() < (0.5 if is_applying else 0.01):
                self._fork(draw.choice(self._actions))
            self._is_done.wait(0.002)

    def _look_up(self) -> bool:
        """Check that no row changes during a lookup; return True if a version is being applied."""
        with self._predictor.reading() as served:
            for table in self._served.values():
                first = table[: len(table) // 2].clone()
                if not torch.equal(first, table[: len(table) // 2]):
                    raise AssertionError("a row changed inside reading()")
        return served.applying is not None

    def _serve(self) -> None:
        """Look rows up and exit, like a worker of a preloading web server."""
        for _ in range(_NUM_LOOKUPS):
            self._look_up()

    def _load(self) -> None:
        """Prepare batches and record metrics, like a data loading worker."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            with MONITOR.span("soak.load"):
                batch(self._spec, generator)
            MONITOR.counter("soak.loaded").add(1)

    def _fork(self, action: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(_CHILD_SECONDS)  # ends a child that hangs
                action()
                code = 0
            finally:
                os._exit(code)
        self.counts[f"forks: {action.__name__.strip('_')}"] += 1  # lost if two threads count at once
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            self.problems.append(f"a forked child that called {action.__name__} ended with {code}")

    def _end(self) -> None:
        self._publisher.flush()
        last = self._publisher.publish()
        deadline = time.monotonic() + _JOIN_SECONDS
        while self._predictor.version != last.version and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.monotonic()
        self._predictor.stop()
        self._publisher.close()
        if not MONITOR.stop():
            self.problems.append("the monitor did not stop in time")
        self.counts["milliseconds to stop"] = int(1000 * (time.monotonic() - begin))
        if self._predictor.version != last.version:
            self.problems.append(f"the predictor is at version {self._predictor.version} of {last.version}")
        for fqn in self._tracker.tables:
            (first, *_) = self._tracker.shards[fqn].columns
            trained = torch.cat(list(self._tracker.live.column_views(fqn)), dim=1)
            if not torch.equal(trained, self._served[fqn]):
                self.problems.append(f"{fqn} differs from the trainer, columns from {first}")
        self._tracker.detach()
        self.counts["versions"] = last.version
        if self._publisher.error is not None or self._publisher.upkeep_error is not None:
            self.problems.append(f"publisher: {self._publisher.error}, upkeep: {self._publisher.upkeep_error}")


def _left(before: set[threading.Thread]) -> list[str]:
    """Return the additional threads that are left after some time to end."""
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(thread.name for thread in set(threading.enumerate()) - before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run once; return 0 if no check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", nargs="+", choices=("load", "serve"), default=("load", "serve"))
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root = Path(folder)
        dist.init_process_group("gloo", init_method=f"file://{root}/group", rank=0, world_size=1)
        before = set(threading.enumerate())
        gc.freeze()  # a child that collects garbage would copy the whole heap
        soak = Soak(root, options.seed, options.children)
        soak.run(options.seconds)
        soak.problems += [f"thread {name} is left" for name in _left(before)]
        soak.problems += [f"waited too long for the lock of {each}" for each in _WAITS.too_long]
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            soak.problems.append("a child is left")
        dist.destroy_process_group()
    seconds, place = _WAITS.longest
    answer: dict[str, Any] = dict(soak.counts) | {
        "locks acquired": _WAITS.num_acquired,
        "of these contended": _WAITS.num_contended,
        "longest wait in milliseconds": round(1000 * seconds, 1),
        "for the lock of": place.rpartition("/")[2],
        "problems": len(soak.problems),
    }
    print("\n".join(soak.problems), file=sys.stderr)
    print(json.dumps(answer))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
