"""Serve a model that learns raw ids: TorchRec's managed collisions admit and evict them during training.

Shows a table with fewer rows than ids, how many ids each version evicted, and a TorchRec model and a plain tensor that
answer all ids as the trainer does; ids without a row get the default row. Run it: ``python -m examples.raw_ids``

TorchRec's row-wise Adagrad cannot reset evicted rows on the CPU, so the model trains with Adagrad. TorchRec's planner
shards the table over several ranks only if ``buckets`` of its module is a multiple of their number.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch import distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import LRU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim import Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, RawIdIndex

NUM_ROWS, COLUMNS, NUM_IDS = 256, 8, 640
NO_ID = torch.iinfo(torch.int64).max  # in DeltaRows.evicted: no raw id had the row


class Items(torch.nn.Module):
    """An embedding table whose rows belong to the ids that occurred last."""

    def __init__(self) -> None:
        super().__init__()
        configs = [EmbeddingConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])]
        module = MCHManagedCollisionModule(
            zch_size=NUM_ROWS, device=torch.device("cpu"), eviction_interval=2, eviction_policy=LRU_EvictionPolicy()
        )
        collection = ManagedCollisionCollection({"item": module}, configs)
        self.items = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs), collection)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the ``[N, COLUMNS]`` embeddings of ``[N]`` raw ids."""
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        values: Tensor = self.items(features)[0]["item"].values()
        return values


def main() -> None:
    """Train, publish, and compare two predictors with the trainer after each version."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    items = Items()
    apply_optimizer_in_backward(Adagrad, items.parameters(), {"lr": 0.1})
    sharders = [ManagedCollisionEmbeddingCollectionSharder()]
    constraints = {"item": ParameterConstraints(compute_kernels=["fused"])}  # the planner's other kernels need a GPU
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    plan = planner.plan(items, sharders)
    model = DistributedModelParallel(items, device=torch.device("cpu"), plan=plan, sharders=sharders)
    tracker = ModelDeltaTracker(model, consumers=["predictors", "log"])
    url = f"file://{tempfile.mkdtemp()}"
    publisher = Publisher(tracker, url, "predictors")
    publisher.snapshot()

    served = Items().eval()  # its own mapping follows the trainer's
    predictor = Predictor(served, url)
    (fqn,) = tracker.tables  # "items._embedding_module.embeddings.item"
    table, index = torch.zeros(NUM_ROWS, COLUMNS), RawIdIndex(NUM_ROWS)  # serving code without torchrec
    plain = Predictor(ModelTarget({fqn: table}, raw_ids={fqn: index}), url)

    generator = torch.Generator().manual_seed(0)
    every_id = torch.arange(NUM_IDS) + (1 << 40)
    total = 0
    for _ in range(6):
        model.train()
        for _ in range(4):
            ids = every_id[(torch.rand(48, generator=generator) ** 3 * NUM_IDS).long()]  # some ids are frequent
            (model(ids) - 1).square().sum().backward()
            tracker.step()
        evicted = tracker.get_delta("log")[fqn].evicted
        assert evicted is not None  # it is None for tables without managed collisions
        manifest = publisher.publish()
        predictor.sync()
        plain.sync()

        expected = model.eval()(every_id)
        with predictor.reading():
            assert torch.equal(served(every_id), expected)
        with plain.reading():
            assert torch.equal(table[index.rows_of(every_id)], expected)
        num_evicted = int((evicted != NO_ID).sum())
        total += num_evicted
        print(f"version {manifest.version}: {len(evicted)} rows changed, {num_evicted} ids evicted")
    assert total > 0
    print(f"all {NUM_IDS} ids get the trainer's answer in both predictors, after each version")
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
