"""Trainers that are killed and resumed, and their predictors: ``python -m tests.system.crash --seeds 200``.

A run has several lives. In each life one or two ranks with a new sharding load the newest or an older checkpoint, claim
the stream, publish, train, save and publish again, until a SIGKILL ends all of them at a random moment; the last life
ends by itself. The moment is a random number of actions, counted in memory shared with the parent, plus a random
fraction of an action's duration, so that slow machines are not killed earlier. After each publish of a life, a
predictor that follows through all lives and a new predictor must equal the trainer bit for bit. The parent imports
everything and uses neither store nor process group, so that it can fork.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.tracker.row_sets.numba import load_loops
from tests.models import Spec, Table, batch, shard

_TIMEOUT = timedelta(seconds=30)
_LIFE_SECONDS = 60.0  # of the ranks of a life together
_MAX_ACTIONS = 40
_DONE = "done"


class Progress:
    """Counter of rank 0's actions in memory that the parent allocated before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        self._begin = time.monotonic()

    @property
    def count(self) -> int:
        """Return the number of actions done."""
        return int.from_bytes(self._memory[:8], "little")

    def add(self) -> None:
        """Count one action, on rank 0 only."""
        if dist.get_rank() == 0:
            self._memory[:8] = (self.count + 1).to_bytes(8, "little")

    @property
    def seconds_each(self) -> float:
        """Return the average seconds per action so far."""
        return (time.monotonic() - self._begin) / max(1, self.count)


class Life:
    """One rank of one life."""

    def __init__(self, root: Path, seed: int, life: int, progress: Progress) -> None:
        self._root = root
        self._progress = progress
        self._draw = random.Random(f"{seed} {life}")  # the same on all ranks
        world_size = dist.get_world_size()
        last = world_size - 1
        shardings = ["row", "table:0", f"table:{last}", "column:0,0", f"column:0,{last}"]
        names = {"a": 17, "b": 9, "c": 30}
        self._spec = Spec([Table(name, rows, self._draw.choice(shardings)) for name, rows in names.items()])
        self._model = shard(self._spec)
        settings = random.Random(seed)  # the same in all lives
        has_scores = settings.random() < 0.5
        mode = TrackingMode.EMBEDDING if has_scores else TrackingMode.ID_ONLY
        self._tracker = ModelDeltaTracker(self._model, ["stream", "other"], mode=mode)
        self._progress.add()
        self._resume()
        self._progress.add()
        self._publisher = Publisher(
            self._tracker,
            f"file://{root}/stream",
            "stream",
            dense=self._model.module.dense,
            top_k=TopK(rows=4) if has_scores else None,
            cadence=Cadence(batches=2),
            timeout=_TIMEOUT,
        )
        self._actions = {self.train: 8, self.save: 3, self.check: 1}
        self._progress.add()
        self._generator = torch.Generator().manual_seed(1000 * seed + 10 * life + dist.get_rank())
        self._optimizer = torch.optim.SGD(self._model.module.dense.parameters(), lr=0.01)
        if dist.get_rank() == 0 and self._publisher._reader.is_repairing:
            (root / f"repaired-{life}").touch()

    def _resume(self) -> None:
        saved = sorted(path.parent for path in self._root.glob(f"checkpoints/*/{_DONE}"))
        if not saved:
            return
        path = saved[-1] if len(saved) < 2 or self._draw.random() < 0.7 else saved[-2]
        state = {"model": self._model.state_dict(), "tracker": SavedTracker(self._tracker, path)}
        dcp.load(state, checkpoint_id=path)

    def train(self) -> None:
        self._optimizer.zero_grad()
        self._model(batch(self._spec, self._generator)).backward()
        self._optimizer.step()
        self._tracker.step()
        self._publisher.step()

    def save(self) -> None:
        path = self._root / "checkpoints" / f"{time.time_ns() if dist.get_rank() == 0 else 0:020d}"
        names = [str(path)]
        dist.broadcast_object_list(names)
        path = Path(names[0])
        dcp.save({"model": self._model.state_dict(), "tracker": self._tracker}, checkpoint_id=path)
        dist.barrier()
        if dist.get_rank() == 0:
            (path / _DONE).touch()

    def check(self) -> None:
        """Publish everything, and check that every predictor equals the trainer."""
        manifest = self._publisher.publish()
        while manifest.pending_rows:
            manifest = self._publisher.publish()
        self._compare(Predictor(held := self._empty(), f"file://{self._root}/stream"), held)
        if dist.get_rank() == 0:
            place = self._root / "place.json"
            held = self._files()
            survivor = Predictor(held, f"file://{self._root}/stream")
            survivor.load_state_dict(json.loads(place.read_text()) if place.exists() else {})
            self._compare(survivor, held)
            draft = place.with_suffix(".draft")
            draft.write_text(json.dumps(survivor.state_dict()))
            draft.replace(place)
        dist.barrier()

    def live(self, *, is_last: bool) -> None:
        self.check()
        for _ in range(12 if is_last else 1000):
            action = self._draw.choices([*self._actions], weights=[*self._actions.values()])[0]
            action()
            self._progress.add()
        self.check()
        self._publisher.close()

    def _compare(self, predictor: Predictor, held: dict[str, Tensor]) -> None:
        predictor.sync()
        for fqn, spec in self._tracker.shards.items():
            rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
            for (first, end), view in zip(spec.columns, self._tracker.live.column_views(fqn), strict=True):
                assert torch.equal(held[fqn][rows, first:end], view), f"{fqn} at version {predictor.version}"
        if dist.get_rank() == 0:  # rank 0's dense tensors are published
            for name, tensor in self._dense().items():
                assert torch.equal(held[name], tensor), name

    def _dense(self) -> dict[str, Tensor]:
        return {f"dense.{name}": tensor.detach() for name, tensor in self._model.module.dense.named_parameters()}

    def _shapes(self) -> dict[str, Sequence[int]]:
        tables = {fqn: (spec.num_rows, spec.dim) for fqn, spec in self._tracker.tables.items()}
        return tables | {name: tuple(tensor.shape) for name, tensor in self._dense().items()}

    def _empty(self) -> dict[str, Tensor]:
        return {name: torch.full(tuple(shape), -1.0) for name, shape in self._shapes().items()}

    def _files(self) -> dict[str, Tensor]:
        """Map tables in files, which survive a kill during a write."""
        folder = self._root / "tables"
        folder.mkdir(exist_ok=True)
        return {
            name: torch.from_file(str(folder / name), shared=True, size=torch.Size(shape).numel()).view(tuple(shape))
            for name, shape in self._shapes().items()
        }


def _rank(root: Path, seed: int, life: int, progress: Progress, rank: int, world_size: int, *, is_last: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/group-{life}", rank=rank, world_size=world_size, timeout=_TIMEOUT
    )
    Life(root, seed, life, progress).live(is_last=is_last)
    dist.destroy_process_group()


def import_early() -> None:
    """Import modules that each rank of each life would import otherwise, which takes a second for each module."""
    load_loops()
    import_module("torch.distributed.optim")


def _fork(action: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(int(_LIFE_SECONDS) + 30)
        action()
        code = 0
    except BaseException:  # noqa: BLE001  the parent reads it
        log.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def live(name: str, ranks: Sequence[Callable[[], None]], root: Path, progress: Progress, end: float | None) -> None:
    """Fork a process for each rank of a life, and wait until they end.

    Args:
        name: name of the life, for its files and its errors.
        ranks: what each rank does.
        root: directory of the ranks' errors.
        progress: counter of rank 0's actions.
        end: number of actions after which all ranks are killed, with a fraction of an action's duration; None to
            let the ranks end by themselves.

    Raises:
        AssertionError: if a rank raised before the kill, or did not end by itself in time.
    """
    logs = [root / f"{name}-rank-{rank}.log" for rank in range(len(ranks))]
    pids = [_fork(action, log) for action, log in zip(ranks, logs, strict=True)]
    deadline, ended, is_due = time.monotonic() + _LIFE_SECONDS, set[int](), False
    while len(ended) < len(pids) and time.monotonic() < deadline:
        if end is not None and not is_due and progress.count >= int(end):
            is_due, deadline = True, time.monotonic() + end % 1 * 2 * progress.seconds_each
        ended |= {pid for pid in pids if pid not in ended and os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.001)
    for pid in pids:
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    # A killed rank may leave a partial line.
    errors = [log.read_text() for pid, log in zip(pids, logs, strict=True) if pid in ended and log.exists()]
    # The rank that is killed second may have noticed the death of the first.
    faults = [error for error in errors if "RankLostError" not in error and "Connection closed" not in error]
    if end is None:
        faults = errors
    if faults or (end is None and len(ended) < len(pids)):
        raise AssertionError(f"{name} of {len(pids)} ranks: {faults or 'it did not end'}")


def run(seed: int, root: Path, num_lives: int = 4) -> dict[str, Any]:
    """Run all lives of a seed; raise the first failure."""
    draw = random.Random(f"lives of {seed}")
    for life in range(num_lives):
        is_last = life == num_lives - 1
        world_size = draw.choice([1, 2])
        progress = Progress()
        ranks = [
            partial(_rank, root, seed, life, progress, rank, world_size, is_last=is_last) for rank in range(world_size)
        ]
        end = None if is_last else draw.randrange(_MAX_ACTIONS) + draw.random()
        live(f"seed {seed}, life {life}", ranks, root, progress, end)
    checkpoints = len(list(root.glob(f"checkpoints/*/{_DONE}")))
    versions = len(list(root.glob("stream/log/*.json")))
    repairs = len(list(root.glob("repaired-*")))
    return {"checkpoints": checkpoints, "versions": versions, "repairs": repairs}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds, and print what each covered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    import_early()
    totals = {"checkpoints": 0, "versions": 0, "repairs": 0}
    for seed in range(options.first, options.first + options.seeds):
        root = Path(tempfile.mkdtemp(prefix="crash-"))
        try:
            (root / "checkpoints").mkdir()
            seen = run(seed, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        totals = {name: totals[name] + seen[name] for name in totals}
        print(json.dumps(totals | {"seeds": seed + 1 - options.first}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
