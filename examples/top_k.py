"""Publish within a bandwidth budget: each version has the rows that changed most, at most 16 KiB.

Shows how much of the change is in a few rows. The other rows stay pending and are published later, so nothing is lost:
without training, a few more versions make the predictor equal to the trainer. Run it:
``python -m examples.top_k``
"""

from __future__ import annotations

import tempfile

import torch
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode

NUM_ROWS, COLUMNS = 20_000, 16
TABLE = "embedding_bags.item"
BUDGET_BYTES = 16 << 10
ROW_BYTES = 4 * COLUMNS + 8  # values and id


def main() -> None:
    """Train on items with a Zipf distribution, and publish within the budget."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(collection, device=torch.device("cpu"))

    url = f"file://{tempfile.mkdtemp()}"
    # EMBEDDING keeps the last published values, from which the distance is measured.
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    # A row that fifty versions have left out is in the next one, even above the budget.
    publisher = Publisher(tracker, url, top_k=TopK(num_bytes=BUDGET_BYTES, max_age=50))
    publisher.snapshot()
    served = torch.empty(NUM_ROWS, COLUMNS)
    predictor = Predictor({TABLE: served}, url)
    predictor.sync()

    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, NUM_ROWS + 1)  # Zipf
    for _ in range(6):
        for _ in range(5):
            train(model, weights, generator)
            tracker.step()
        before = distance(tracker, served)
        manifest = publisher.publish()
        predictor.sync()
        changed = manifest.num_rows + manifest.pending_rows
        print(
            f"version {manifest.version}: {manifest.num_rows} of {changed} changed rows, "
            f"{1 - distance(tracker, served) / before:.0%} of the distance"
        )
        assert manifest.num_rows * ROW_BYTES <= BUDGET_BYTES
        assert manifest.pending_rows > 0

    num_versions = 0
    while (manifest := publisher.publish()).pending_rows:
        num_versions += 1
        assert manifest.num_rows * ROW_BYTES <= BUDGET_BYTES
    predictor.sync()
    assert served.equal(tracker.read_rows(TABLE))
    print(f"equal after {num_versions + 1} versions without training, bit for bit")
    publisher.close()
    dist.destroy_process_group()


def train(model: DistributedModelParallel, weights: torch.Tensor, generator: torch.Generator) -> None:
    """Train one batch, which moves its rows towards 1."""
    ids = torch.multinomial(weights, 256, replacement=True, generator=generator)
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    (model(features).values() - 1).square().sum().backward()


def distance(tracker: ModelDeltaTracker, served: torch.Tensor) -> float:
    """Return the sum of squared differences between the predictor's table and the trainer's."""
    return (tracker.read_rows(TABLE) - served).square().sum().item()


if __name__ == "__main__":
    main()
