"""Compaction in the post-odist hook compared with compaction after the batch, on two ranks.

``torchrun --nproc-per-node 2 -m benchmarks.time_compaction``. Both variants take turns in a random order, which is the
same on both ranks. Each rank times a batch from the start of its forward until its rows are compacted. A barrier
precedes each batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Figures, interleaved
from benchmarks.workloads import bags, tables
from delta_tracker import ModelDeltaTracker, TrackingMode

_DIM = 32
_NUM_TABLES = 4


class _Case:
    """Row-wise tables on all ranks, tracked for a consumer that reads every batch and one that never reads.

    Args:
        mode: tracking mode.
        num_rows: number of rows of each table.
        batch: number of bags of each table in a batch of one rank.
    """

    def __init__(self, mode: TrackingMode, num_rows: int, batch: int) -> None:
        table_set = tables(_NUM_TABLES, num_rows, _DIM)
        self._names = [table.name for table in table_set]
        self._num_rows, self._batch = num_rows, batch
        sharder = EmbeddingBagCollectionSharder()
        model = torch.nn.ModuleDict({"ebc": bags(table_set)})
        plan = construct_module_sharding_plan(
            model.get_submodule("ebc"),
            {name: row_wise() for name in self._names},
            sharder=sharder,
            local_size=dist.get_world_size(),
            world_size=dist.get_world_size(),
            device_type="cpu",
        )
        self._model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[sharder],
        )
        self._tracker = ModelDeltaTracker(self._model, ["each", "none"], auto_compact=True, mode=mode)
        self._writes = self._tracker._log.writes  # noqa: SLF001  to switch the hook's work off
        self._launched = self._writes.output_launched
        self._ids = torch.Generator().manual_seed(dist.get_rank())

    def in_hook(self) -> Figures:
        """Compact after the output distribution was launched."""
        return self._timed(self._launched, lambda: None)

    def after_batch(self) -> Figures:
        """Compact after the backward pass."""
        return self._timed(lambda: None, self._tracker.compact)

    def _timed(self, launched: Callable[[], None], finish: Callable[[], None]) -> Figures:
        count = self._batch * _NUM_TABLES
        values = torch.randint(self._num_rows, (count,), generator=self._ids)
        features = KeyedJaggedTensor(self._names, values, lengths=torch.ones(count, dtype=torch.int64))
        self._tracker.get_delta("each")
        self._writes.output_launched = launched  # type: ignore[method-assign]
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self._model.module["ebc"](features).values().sum().backward()
        self._tracker.step()
        finish()
        return {"wall": time.perf_counter() - begin, "cpu": time.process_time() - begin_cpu}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table on rank 0."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node 2 -m benchmarks.time_compaction")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--batch", type=int, default=2048, help="bags of each table in a batch of one rank")
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    lines = ["| mode | figure | post-odist | after the batch | ratio |", "|---|---|---|---|---|"]
    for mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING):
        case = _Case(mode, arguments.rows, arguments.batch)
        found = interleaved({"hook": case.in_hook, "after": case.after_batch}, repeats=arguments.repeats, warmups=3)
        for figure in ("wall", "cpu"):
            hook, after = found["hook"][figure], found["after"][figure]
            ratio = hook.median / after.median
            lines.append(f"| {mode.value} | {figure} ms | {hook.text(1000, 2)} | {after.text(1000, 2)} | {ratio:.2f} |")
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
