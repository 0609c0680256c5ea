"""One rank of ``benchmarks.bench_recovery``: equal models under DCP and under a publisher of optimizer states.

The model is that of ``benchmarks.bench_step`` with row-wise tables and row-wise Adagrad. Both models train the same
batches, so that their tables are equal.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.nn import functional
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.bench_step import Dlrm, recorded_seconds
from benchmarks.ids import zipf_ids
from benchmarks.stores import lookups
from benchmarks.workloads import Table, tables
from delta_tracker import ModelDeltaTracker, Publisher, Recovery
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.recovery.restore import restore
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage

_NUM_DENSE = 13
_TIMEOUT = timedelta(minutes=10)
_PLAIN, _STREAM, _SAVE, _ASYNC = "no checkpoint", "delta_tracker", "dcp.save", "dcp.async_save"
Found = dict[str, dict[str, list[float]]]
"""Case to figure to all repeats."""
Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the workload.

    Args:
        num_tables: number of tables.
        num_rows: number of rows of each table.
        batch_size: number of samples of a batch, over all ranks, with one id for each table.
        intervals: numbers of batches from one checkpoint to the next.
        repeats: number of checkpoints of each kind and interval.
        shrink: divisor of rows, samples and widths of the dense layers for the long stream.
        num_versions: number of versions of the long stream.
        compact_every: number of its versions between two compactions.
        num_restored: number of versions that are restored: the first, the last, and others drawn at random.
    """

    num_tables: int
    num_rows: int
    batch_size: int
    intervals: tuple[int, ...]
    repeats: int
    shrink: int
    num_versions: int
    compact_every: int
    num_restored: int


class _Trained:
    """A model with its optimizers.

    Args:
        table_set: the tables.
        shrink: divisor of the widths of the dense layers.
    """

    def __init__(self, table_set: tuple[Table, ...], shrink: int = 1) -> None:
        torch.manual_seed(0)
        world_size, sharder = dist.get_world_size(), EmbeddingBagCollectionSharder()
        model = Dlrm(table_set, RowWiseAdagrad, shrink)
        plan = construct_module_sharding_plan(
            model.ebc,
            {table.name: row_wise() for table in table_set},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
        )
        dense = [each for name, each in self.model.named_parameters() if "ebc" not in name]
        self.optimizer = torch.optim.Adam(dense, lr=0.001)
        self.tracker: ModelDeltaTracker | None = None
        self.advance_seconds = 0.0
        """Time in ``tracker.step`` so far."""

    def step(self, batch: Batch) -> float:
        """Train one batch; return the seconds."""
        begin = time.perf_counter()
        dense, sparse, labels = batch
        self.optimizer.zero_grad()
        logits = self.model(dense, sparse)
        functional.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        trained = time.perf_counter()
        if self.tracker is not None:
            self.tracker.step()
        end = time.perf_counter()
        self.advance_seconds += end - trained
        return end - begin

    def state(self) -> dict[str, Any]:
        """Return what DCP saves."""
        return {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def digests(self) -> dict[str, str]:
        """Return the hash of this rank's part of each tensor of :meth:`state`."""
        found = {}
        for name, tensor in _tensors(self.state(), ""):
            found[name] = xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().numpy().data)
        return found


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401  a tree
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif hasattr(value, "local_shards"):
        yield from ((f"{name}.{index}", shard.tensor) for index, shard in enumerate(value.local_shards()))
    elif isinstance(value, Tensor):
        yield name, value


class _Batches:
    """Different batches, the same ones in each run."""

    def __init__(self, table_set: tuple[Table, ...], batch_size: int) -> None:
        self._tables, self._size = table_set, batch_size // dist.get_world_size()
        self._generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def draw(self) -> Batch:
        """Return the next batch of this rank."""
        sparse = lookups({each.name: zipf_ids(each.num_rows, self._size, self._generator) for each in self._tables})
        dense = torch.rand(self._size, _NUM_DENSE, generator=self._generator)
        return dense, sparse, torch.randint(2, (self._size,), generator=self._generator).float()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _slowest(seconds: float) -> float:
    """Return the largest of the ranks' times."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _add(found: Found, case: str, **figures: float) -> None:
    for figure, value in figures.items():
        found.setdefault(case, {}).setdefault(figure, []).append(value)


def _publisher(trained: _Trained, root: Path, name: str) -> Publisher:
    assert trained.tracker is not None
    return Publisher(
        trained.tracker,
        Storage((root / name).as_uri(), create=True, fsync=True),
        name,
        recovery=Recovery(training_state={"optimizer": trained.optimizer}),
        cadence=Cadence(batches=1),
        timeout=_TIMEOUT,
    )


class _Checkpoints:
    """Measures checkpoints of each kind while two models train."""

    def __init__(self, root: Path, size: Size) -> None:
        table_set = tables(size.num_tables, size.num_rows)
        self._root, self._size, self._found = root, size, Found()
        self._plain, self._tracked = _Trained(table_set), _Trained(table_set)
        self._tracked.tracker = ModelDeltaTracker(self._tracked.model, [_STREAM])
        self._batches = _Batches(table_set, size.batch_size)
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._step_seconds = 0.0
        self._train(3)
        self._publisher = _publisher(self._tracked, root, _STREAM)
        self._publisher.snapshot()

    def run(self) -> Found:
        """Return all figures."""
        for interval in self._size.intervals:
            for _ in range(self._size.repeats):
                self._round(interval)
        for _ in range(self._size.repeats):
            self._resume()
        self._publisher.close()
        assert self._tracked.tracker is not None
        self._tracked.tracker.detach()
        return self._found

    def _train(self, num_batches: int) -> dict[str, float]:
        """Train both models in turns.

        Returns:
            Of the slowest rank: ``plain`` and ``tracked``, the median seconds of a step; ``ratio``, the median of the
            ratios of the two steps on a batch; ``tracking``, the seconds in the tracker per step.
        """
        times: tuple[list[float], list[float]] = [], []
        before = recorded_seconds() + self._tracked.advance_seconds
        for number in range(num_batches):
            batch = self._batches.draw()
            for index in (0, 1) if number % 2 else (1, 0):
                times[index].append((self._plain, self._tracked)[index].step(batch))
        tracking = (recorded_seconds() + self._tracked.advance_seconds - before) / num_batches
        ratio = statistics.median(map(truediv, times[1], times[0]))
        figures = {"plain": statistics.median(times[0]), "tracked": statistics.median(times[1])}
        return {name: _slowest(value) for name, value in {**figures, "ratio": ratio, "tracking": tracking}.items()}

    def _round(self, interval: int) -> None:
        """Train an interval, and make a checkpoint of each kind."""
        step = self._train(interval)
        _add(self._found, _PLAIN, seconds=step["plain"])
        case = f"{_STREAM} every {interval}"
        _add(self._found, case, tracking=step["tracking"] / step["plain"], ratio=step["ratio"])
        self._publish(interval, step["tracked"])
        if interval == self._size.intervals[0]:
            self._save()
            self._save_in_background(step["plain"])

    def _publish(self, interval: int, step_seconds: float) -> None:
        folder = self._root / _STREAM
        num_bytes = _folder_bytes(folder)
        before = self._publisher.version
        batches: list[Batch] = []

        def step() -> bool:
            self._tracked.step(batches[-1])
            self._publisher.step()
            return self._publisher.version > before or self._publisher.error is not None

        excess = self._excess(step, step_seconds, batches)
        if self._publisher.error is not None:
            raise self._publisher.error
        for batch in batches:
            self._plain.step(batch)
        dist.barrier()
        case = f"{_STREAM} every {interval}"
        _add(self._found, case, excess=excess, bytes=_folder_bytes(folder) - num_bytes)

    def _save(self) -> None:
        folder = self._root / "save"
        begin = time.perf_counter()
        dcp.save(self._plain.state(), checkpoint_id=folder)
        excess = _slowest(time.perf_counter() - begin)
        dist.barrier()
        _add(self._found, _SAVE, excess=excess, bytes=_folder_bytes(folder))
        self._remove(folder)

    def _save_in_background(self, step_seconds: float) -> None:
        folder = self._root / "async"
        begin = time.perf_counter()
        future = dcp.async_save(
            self._plain.state(),
            checkpoint_id=folder,
            process_group=self._group,
            async_stager=BlockingAsyncStager(),  # the default one cannot copy a ShardedTensor
        )
        assert isinstance(future, Future)
        waited = _slowest(time.perf_counter() - begin)
        batches: list[Batch] = []

        def step() -> bool:
            self._plain.step(batches[-1])
            is_done = torch.tensor([future.done()])
            dist.all_reduce(is_done, dist.ReduceOp.MIN)
            return bool(is_done)

        excess = waited + self._excess(step, step_seconds, batches)
        future.result()
        for batch in batches:
            self._tracked.step(batch)
        dist.barrier()
        _add(self._found, _ASYNC, excess=excess, waited=waited, bytes=_folder_bytes(folder))
        self._remove(folder)

    def _excess(self, step: Callable[[], bool], step_seconds: float, batches: list[Batch]) -> float:
        """Train until a checkpoint is complete; return the seconds above those of as many steps without one."""
        seconds = 0.0
        while True:
            batches.append(self._batches.draw())
            begin = time.perf_counter()
            is_done = step()
            seconds += time.perf_counter() - begin
            if is_done:
                return max(0.0, _slowest(seconds) - len(batches) * step_seconds)

    def _resume(self) -> None:
        """Restore both models from their newest checkpoints, train a batch, and compare the models."""
        folder = self._root / "save"
        dcp.save(self._plain.state(), checkpoint_id=folder)
        version = self._publisher.publish().version
        self._publisher.close()
        batch = self._batches.draw()
        for trained in (self._plain, self._tracked):
            trained.step(self._batches.draw())
        seconds = {
            _SAVE: self._timed(lambda: self._load(folder, batch)),
            _STREAM: self._timed(lambda: self._restore(version, batch)),
        }
        assert self._plain.digests() == self._tracked.digests(), "the models differ after the first batch"
        for case, each in seconds.items():
            _add(self._found, case, resume=each)
        self._publisher = _publisher(self._tracked, self._root, _STREAM)
        self._remove(folder)

    def _timed(self, work: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        return _slowest(time.perf_counter() - begin)

    def _load(self, folder: Path, batch: Batch) -> None:
        state = self._plain.state()
        dcp.load(state, checkpoint_id=folder)
        self._plain.optimizer.load_state_dict(state["optimizer"])
        self._plain.step(batch)

    def _restore(self, version: int, batch: Batch) -> None:
        _restore(self._tracked, self._root / _STREAM, version)
        self._tracked.step(batch)

    @staticmethod
    def _remove(folder: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()


def _restore(trained: _Trained, stream: Path, version: int) -> None:
    restore(
        trained.model,
        stream.as_uri(),
        version,
        tracker=trained.tracker,
        recovery=Recovery(training_state={"optimizer": trained.optimizer}),
        timeout=_TIMEOUT,
    )


def _recoveries(root: Path, size: Size) -> Found:
    """Publish a long stream twice, one of them compacted; restore versions of both, and compare the tables."""
    table_set = tables(size.num_tables, max(2, size.num_rows // size.shrink))
    trained, found = _Trained(table_set, size.shrink), Found()
    names = ("naive", "compacted")
    trained.tracker = ModelDeltaTracker(trained.model, names)
    batches = _Batches(table_set, max(2, size.batch_size // size.shrink))
    for _ in range(2):
        trained.step(batches.draw())
    publishers = {name: _publisher(trained, root, name) for name in names}
    digests, versions = {}, []
    for number in range(size.num_versions):
        trained.step(batches.draw())
        versions.append({name: publisher.publish().version for name, publisher in publishers.items()})
        digests[number] = trained.digests()
        if number % size.compact_every == size.compact_every - 1 and dist.get_rank() == 0:
            compact(Storage((root / "compacted").as_uri()))
    for publisher in publishers.values():
        publisher.close()
    dist.barrier()
    for name in names:
        _add(found, name, bytes=_folder_bytes(root / name))
    order = torch.randperm(size.num_versions - 2, generator=torch.Generator().manual_seed(0))
    drawn = (order[: size.num_restored - 2] + 1).tolist()
    for number in (0, size.num_versions - 1, *drawn):
        for name in names if number % 2 else names[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            _restore(trained, root / name, versions[number][name])
            _add(found, name, seconds=_slowest(time.perf_counter() - begin))
            assert trained.digests() == digests[number], f"{name}: version {number} differs"
    trained.tracker.detach()
    return found


def run_rank(rank: int, world_size: int, root: Path, size: Size, results: Queue[Found]) -> None:
    """Measure on one rank; rank 0 puts all figures into the queue."""
    torch.set_num_threads(1)
    method = f"file://{root}/group"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    found = _Checkpoints(root, size).run()
    found |= _recoveries(root, size)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()
