"""One rank of ``benchmarks.growth``: publishes of ranks that have equal shares of one table."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from benchmarks.stores import lookups
from benchmarks.workloads import bags, tables
from delta_tracker import ModelDeltaTracker, Publisher
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage

_ROWS = 1000  # of the table, per rank
_IDS = 100  # that each rank looks up per version
_DIM = 8


def publish(rank: int, world_size: int, *, directory: str, num_versions: int) -> dict[str, list[float]]:
    """Publish versions, and return the seconds and the processor seconds that this rank needed for each."""
    table_set = tables(1, _ROWS * world_size, _DIM)
    sharder, collection = EmbeddingBagCollectionSharder(), bags(table_set)
    plan = construct_module_sharding_plan(
        collection,
        {table.name: row_wise() for table in table_set},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": collection}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    tracker, storage = ModelDeltaTracker(model), Storage(Path(directory), create=True)
    found: dict[str, list[float]] = {"seconds": [], "processor": []}
    with Publisher(tracker, storage) as publisher:
        publisher.snapshot()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(num_versions):
            ids = torch.randperm(_ROWS * world_size, generator=generator)[:_IDS]
            pooled = model.module["ebc"](lookups({table_set[0].name: ids})).values()
            pooled.backward(torch.rand(pooled.shape))
            tracker.step()
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            publisher.publish()
            found["seconds"].append(time.perf_counter() - began)
            found["processor"].append(time.process_time() - processor)
        version = publisher.version
    if rank == 0:
        entry = StreamLog(storage).read(version)
        assert entry is not None
        assert len(entry.parts) == world_size
        assert sum(block.num_rows for part in entry.parts for block in part.blocks) > _IDS / 2
    return found
