"""Trainers that are killed and restored from their stream: ``python -m tests.system.resume --seeds 100``.

A seed trains on two ranks, or on four for a grid, publishes after every batch with the states of its optimizers, and is
killed at a random moment, once or twice. A run without any interruption, tracker or publisher is the oracle. The stream
is then restored on one, two and four ranks, from its head or from an older version:

- The state at the cut must be the oracle's, bit for bit: rows, states, counters, learning rates, dense tensors, the
  optimizers, the position in the data, and on as many ranks the random numbers.
- On as many ranks, every further loss and the state at the end must be the oracle's.
- On other ranks they must be those of a trainer that ``dcp.load`` restored from a ``dcp.save`` of the oracle at the
  same batch, after the same first step. A table whose optimizer cannot follow must be refused before anything is
  written.
- The first version after the restore must be a delta, and after it and at the end, predictors through all lives and new
  ones must equal the trainer.

The moment of a kill is drawn as in ``tests/system/crash.py``. The parent imports everything and uses neither a store
nor a process group, so that it can fork.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import DataPosition, ModelDeltaTracker, ModelTarget, Predictor, Publisher, Recovery, Upkeep
from delta_tracker.errors import NotRecoverableError, RankFailedError, RestoreMismatchError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.recovery.restore import Restored, restore
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.system.crash import Progress, import_early, live
from tests.system.resumed_trainer import Job, Loader, Trainer, differences, whole_tables

_TIMEOUT = timedelta(seconds=30)
_WORLD_SIZES = (1, 2, 4)
_SHORT = (2, 4, 2, 4, 1)  # on which the seeds of --short continue
_MIN_ACTIONS = 2


def _join(root: Path, name: str, job: Job, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(job.spec(world_size).local_size or world_size)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/group of {name}", rank=rank, world_size=world_size, timeout=_TIMEOUT
    )


def _same(expected: Any, found: Any, what: str) -> None:
    lines = differences(expected, found, what)
    assert not lines, lines[:10]


class Life:
    """One rank of a trainer that publishes."""

    def __init__(self, root: Path, job: Job) -> None:
        self._root, self._job = root, job
        self._url = f"file://{root}/stream"
        self.trainer = Trainer(job)
        self.tracker = ModelDeltaTracker(self.trainer.model, ["stream"])
        self.position = DataPosition(self.trainer.loader)
        self.tracker.attach_data(self.position)
        self._random = RandomStates()
        self._publisher: Publisher | None = None

    @property
    def _recovery(self) -> Recovery:
        ranks = self.trainer.rank_state | {"random": self._random}
        return Recovery(training_state=self.trainer.training_state, rank_state=ranks)

    @property
    def publisher(self) -> Publisher:
        """The publisher, built at the first use."""
        if self._publisher is None:
            every = 6 if self._job.seed % 5 == 3 else None
            self._publisher = Publisher(
                self.tracker,
                self._url,
                recovery=self._recovery,
                dense=self.trainer.model.module.dense if self._job.seed % 2 else None,
                cadence=Cadence(batches=1, snapshot_every=every),
                upkeep=Upkeep(compact_every=3 if self._job.seed % 5 == 1 else None),
                timeout=_TIMEOUT,
            )
        return self._publisher

    def warm_up(self) -> None:
        """Train batches that a restore overwrites."""
        warm_up(self.trainer, self._job)

    def restore(self, version: int | None) -> Restored:
        """Restore a version, after :meth:`warm_up`."""
        return restore(
            self.trainer.model,
            self._url,
            version,
            tracker=self.tracker,
            recovery=self._recovery,
            data=self.position,
            ignore=() if dist.get_world_size() == self._job.world_size else ("random",),
            timeout=_TIMEOUT,
        )

    def losses(self) -> Iterator[float]:
        """Train batch after batch and publish; yield each loss."""
        for features in ahead(self.position, self._job.num_ahead):
            loss = self.trainer.step(features)
            self.tracker.step()
            if self._job.seed % 2:
                self.publisher.step()
            else:
                self.publisher.publish()
            yield loss

    def check_predictors(self) -> None:
        """Check that a new predictor and one through all lives equal the trainer, after a version without training."""
        tables = {fqn: (spec.num_rows, spec.dim) for fqn, spec in self.tracker.tables.items()}
        self._compare({fqn: torch.full(shape, -1.0) for fqn, shape in tables.items()}, {})
        if dist.get_rank() == 0:
            (folder := self._root / "tables").mkdir(exist_ok=True)
            place = folder / "place.json"
            held = {
                fqn: torch.from_file(str(folder / fqn), shared=True, size=rows * dim).view(rows, dim)
                for fqn, (rows, dim) in tables.items()
            }
            place.write_text(json.dumps(self._compare(held, json.loads(place.read_text()) if place.exists() else {})))
        dist.barrier()

    def _compare(self, held: dict[str, Tensor], place: dict[str, Any]) -> dict[str, Any]:
        predictor = Predictor(ModelTarget(held, dense=False), self._url)
        predictor.load_state_dict(place)
        predictor.sync()
        for table, (row, column), rows, _ in self.trainer.blocks():
            (fqn,) = (each for each in held if each.endswith(f".{table}"))
            found = held[fqn][row : row + len(rows), column : column + rows.shape[1]]
            assert torch.equal(found, rows), f"{fqn} at version {predictor.version}"
        return predictor.state_dict()


def ahead(position: DataPosition[KeyedJaggedTensor], count: int) -> Iterator[KeyedJaggedTensor]:
    """Yield the batches; ``count`` more are drawn already."""
    drawn: deque[KeyedJaggedTensor] = deque()
    for features in position:
        drawn.append(features)
        if len(drawn) > count:
            yield drawn.popleft()


def warm_up(trainer: Trainer, job: Job) -> None:
    """Train two other batches at another learning rate: DDP fixes its buckets after the second one."""
    for group in trainer.model.fused_optimizer.param_groups:
        group["lr"] *= 0.5
    for _, features in zip(range(2), Loader(trainer.spec, job.seed + 1000), strict=False):
        trainer.step(features)


def _train_until_killed(root: Path, job: Job, name: str, progress: Progress, rank: int) -> None:
    _join(root, name, job, rank, job.world_size)
    life = Life(root, job)
    versions = _versions(root)
    if versions and _is_followed(versions[-1].batches[1], job):
        life.warm_up()
        life.restore(None)
    if job.seed % 10 != 9:
        life.publisher.publish()  # otherwise a trainer may be killed before its first version
    for _ in life.losses():
        progress.add()


def _is_followed(num_batches: int, job: Job) -> bool:
    """Return whether a job continues bit for bit after so many batches.

    DDP orders the gradients after the first batch. From 3 ranks on, their sums before it differ from those after a
    warm-up, so that such a job starts again instead.
    """
    return num_batches > 0 or job.world_size == 2


def _versions(root: Path) -> list[Manifest]:
    log = StreamLog(Storage(f"file://{root}/stream", create=True))
    return [entry for entry in map(log.read, log.versions()) if entry is not None and entry.kind != "claim"]


def _survey(root: Path) -> None:
    """Write the version of the head, and of each version its last batch and whether a later snapshot exists."""
    entries = _versions(root)
    snapshots = [entry.version for entry in entries if entry.kind == "snapshot"]
    found = [
        {"version": each.version, "batches": each.batches[1], "needs_snapshot": max(snapshots) > each.version}
        for each in entries
    ]
    (root / "survey.json").write_text(json.dumps(found))


def _train_uninterrupted(root: Path, job: Job, num_batches: int, num_more: int, rank: int) -> None:
    """Train without the library; write the state after ``num_batches``, and losses and state ``num_more`` later."""
    _join(root, "oracle", job, rank, job.world_size)
    trainer = Trainer(job)
    batches = iter(trainer.loader)
    for _ in range(num_batches):
        trainer.step(next(batches))
    torch.save(trainer.record(), root / f"cut-{rank}.pt")
    dcp.save(_dcp_state(trainer), checkpoint_id=root / "dcp")
    losses = [trainer.step(next(batches)) for _ in range(num_more)]
    torch.save((losses, trainer.record()), root / f"end-{job.world_size}-{rank}.pt")
    dist.destroy_process_group()


def _dcp_state(trainer: Trainer) -> dict[str, Any]:
    state = {"model": trainer.model.state_dict()}
    # DCP saves nothing of a fused optimizer without states, and then cannot load it.
    return state if trainer.spec.optimizer == "SGD" else state | {"fused": trainer.model.fused_optimizer.state_dict()}


def _train_from_dcp(root: Path, job: Job, num_batches: int, num_more: int, rank: int, world_size: int) -> None:
    """Restore the oracle's checkpoint on other ranks and train; write losses and state at the end."""
    _join(root, f"dcp {world_size}", job, rank, world_size)
    trainer = Trainer(job)
    warm_up(trainer, job)
    dcp.load(_dcp_state(trainer), checkpoint_id=root / "dcp")
    first = torch.load(root / "cut-0.pt", weights_only=False)
    trainer.model.module.dense.load_state_dict(first["dense"])  # DCP saves the statistics of any rank
    for name, each in trainer.training_state.items():
        each.load_state_dict(first["training"][name])
    for group in trainer.model.fused_optimizer.param_groups:
        group["lr"] = next(iter(first["scalars"].values()))["group_lr"]
    torch.manual_seed(job.seed + rank)
    trainer.loader.load_state_dict(dict.fromkeys(trainer.loader.state_dict(), num_batches))
    batches = iter(trainer.loader)
    losses = [trainer.step(next(batches)) for _ in range(num_more)]
    torch.save((losses, trainer.record()), root / f"end-{world_size}-{rank}.pt")
    dist.destroy_process_group()


def _resume(root: Path, oracle: Path, job: Job, cut: dict[str, Any], num_more: int, rank: int, world_size: int) -> None:
    """Restore a version, and compare the state at the cut, the losses and the state at the end."""
    _join(root, f"resumed {world_size}", job, rank, world_size)
    life = Life(root, job)
    is_same = world_size == job.world_size
    if job.extra == "dense" and not is_same:
        _check_refused(life, cut)
        return
    life.warm_up()
    restored = life.restore(cut["version"])
    assert (restored.version, restored.num_batches) == (cut["version"], cut["batches"]), restored
    _check_cut(life, oracle, job, cut["batches"], is_same=is_same)
    if not is_same:
        torch.manual_seed(job.seed + rank)
    manifest = life.publisher.publish()
    assert (manifest.kind == "snapshot") == cut["needs_snapshot"], manifest.kind
    if cut["is_head"] and job.extra != "data":
        assert sum(block.num_rows for part in manifest.parts for block in part.blocks) == 0 or cut["needs_snapshot"]
    life.check_predictors()
    losses = [loss for _, loss in zip(range(num_more), life.losses(), strict=False)]
    expected_losses, expected = torch.load(oracle / f"end-{world_size}-{rank}.pt", weights_only=False)
    _same(expected_losses, losses, "losses")
    found = life.trainer.record()
    if not is_same:  # DCP restores no counters of FBGEMM
        del expected["scalars"], found["scalars"]
    _same(expected, found, "end")
    life.publisher.publish()
    life.check_predictors()
    life.publisher.close()
    dist.destroy_process_group()


def _check_refused(life: Life, cut: dict[str, Any]) -> None:
    """Check that a version is refused, and that the model is as before."""
    life.warm_up()
    before = life.trainer.record()
    try:
        life.restore(cut["version"])
    except (RestoreMismatchError, RankFailedError):
        _same(before, life.trainer.record(), "refused")
        life.trainer.step(next(iter(life.trainer.loader)))
    else:
        raise AssertionError("the optimizer of a table's parts was restored on other ranks")


def _check_cut(life: Life, oracle: Path, job: Job, num_batches: int, *, is_same: bool) -> None:
    records = [torch.load(oracle / f"cut-{rank}.pt", weights_only=False) for rank in range(job.world_size)]
    found = life.trainer.record()
    assert life.position.num_batches == num_batches
    assert set(life.trainer.loader.state_dict().values()) == {num_batches}
    check_state(records, found, dist.get_rank() if is_same else None)


def check_state(records: Sequence[Mapping[str, Any]], found: Mapping[str, Any], rank: int | None) -> None:
    """Check that a rank continues from the state of a job.

    Args:
        records: what each rank of the job had, see :meth:`Trainer.record`.
        found: what this rank has.
        rank: the rank, if the number of ranks is the same; None if it is not.
    """
    if rank is not None:
        _same(records[rank], found, "cut")
        return
    tables = whole_tables(records)
    for table, (row, column), rows, states in found["blocks"]:
        values, by_column = tables[table]
        place = slice(row, row + len(rows))
        _same(values[place, column : column + rows.shape[1]], rows, table)
        _same([each[place] for each in by_column[column]], states, f"states of {table}")
    scalars = {table: each for record in records for table, each in record["scalars"].items()}
    _same({table: scalars[table] for table in found["scalars"]}, found["scalars"], "scalars")
    _same(records[0]["dense"], found["dense"], "dense")
    _same(records[0]["training"], found["training"], "training")


def _check_empty(root: Path, job: Job, rank: int) -> None:
    """Check that a stream without a version cannot be restored, and that the model can train."""
    _join(root, "empty", job, rank, job.world_size)
    life = Life(root, job)
    life.warm_up()
    try:
        life.restore(None)
    except (NotRecoverableError, RankFailedError):  # the latter if another rank found it
        next(life.losses())
    else:
        raise AssertionError("a version was restored from an empty stream")
    dist.destroy_process_group()


def run(seed: int, root: Path, world_sizes: Sequence[int], max_actions: int, num_more: int) -> Counter[str]:
    """Run all lives of a seed; return what was covered.

    Args:
        seed: seed of the job, of the kills and of the version.
        root: directory for everything.
        world_sizes: numbers of ranks that continue.
        max_actions: number of batches before a kill.
        num_more: number of batches that are compared after the restore.

    Raises:
        AssertionError: at the first difference.
    """
    draw, job = random.Random(f"resume {seed}"), Job.of(seed)

    def play(name: str, body: Callable[..., None], *arguments: object, ranks: int, end: float | None = None) -> None:
        progress = Progress()
        bodies = [
            partial(body, *[progress if each is Progress else each for each in arguments], rank=rank)
            for rank in range(ranks)
        ]
        live(f"seed {seed}: {name}", bodies, root, progress, end)

    (stream := root / "lives").mkdir()
    num_kills = 1 + (seed % 3 == 2)
    for number in range(num_kills):
        name = f"life {number}"
        end = draw.randrange(_MIN_ACTIONS, max_actions) + draw.random()
        play(name, _train_until_killed, stream, job, name, Progress, ranks=job.world_size, end=end)
    live(f"seed {seed}: survey", [partial(_survey, stream)], root, Progress(), None)
    versions = json.loads((stream / "survey.json").read_text())
    covered = Counter({job.optimizer: 1, job.kernel: 1, job.extra: 1, "kills": num_kills})
    if not versions:
        play("empty", _check_empty, stream, job, ranks=job.world_size)
        return covered + Counter(empty=1)
    choices = [each for each in versions if _is_followed(each["batches"], job)]
    if not choices:
        return covered + Counter(untrained=1)
    chosen = choices[-1] if draw.random() < 0.7 else draw.choice(choices)
    cut = chosen | {"is_head": chosen is versions[-1]}
    (oracle := root / "oracle").mkdir()
    play("oracle", _train_uninterrupted, oracle, job, cut["batches"], num_more, ranks=job.world_size)
    for world_size in world_sizes:
        if world_size != job.world_size and job.extra != "dense":
            body = partial(_train_from_dcp, world_size=world_size)
            play(f"dcp {world_size}", body, oracle, job, cut["batches"], num_more, ranks=world_size)
        resumed = root / f"resumed {world_size}"
        shutil.copytree(stream, resumed)
        body = partial(_resume, world_size=world_size)
        play(f"resumed {world_size}", body, resumed, oracle, job, cut, num_more, ranks=world_size)
        covered[f"{world_size} ranks"] += 1
    return covered + Counter(batches=cut["batches"], older=not cut["is_head"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds, and print what they covered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="number of steps that are compared after the restore")
    parser.add_argument("--actions", type=int, default=20, help="largest number of batches before a kill")
    parser.add_argument("--short", action="store_true", help="continue on one number of ranks per seed, in turns")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import_early()
    covered: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        root, begin = Path(tempfile.mkdtemp(prefix="resume-")), time.monotonic()
        world_sizes = (_SHORT[seed % len(_SHORT)],) if options.short else _WORLD_SIZES
        try:
            covered += run(seed, root, world_sizes, options.actions, options.steps)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        seconds = round(time.monotonic() - begin, 1)
        print(json.dumps({"seeds": seed + 1 - options.first, "seconds": seconds, **covered}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
