"""Update TorchRec's quantized inference module while it serves; each received row is quantized.

Shows that the bytes of the served int8 table equal those of the trainer's table, newly quantized. Run it:
``python -m examples.quantized``
"""

from __future__ import annotations

import tempfile
import warnings

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.inference.modules import quantize_inference_model
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher

NUM_ROWS, COLUMNS = 10_000, 32


def main() -> None:
    """Quantize an untrained model, train another one, and let a predictor update the quantized one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = build()
    apply_optimizer_in_backward(RowWiseAdagrad, trained.parameters(), {"lr": 0.1})
    served = quantize(build())
    model = DistributedModelParallel(trained, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    url = f"file://{tempfile.mkdtemp()}"
    publisher = Publisher(tracker, url)
    publisher.snapshot()
    # torchrec quantizes the children of a module, so the served table's name is longer than the trainer's
    predictor = Predictor(ModelTarget(served, names={"embedding_bags.item": "0.embedding_bags.item"}), url)
    predictor.sync()

    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for _ in range(5):
            features = batch(generator)
            (model(features)["item"] - 1).square().sum().backward()
            tracker.step()
        manifest = publisher.publish()
        predictor.sync()
        error = (served(features)["item"] - model(features)["item"]).abs().max().item()
        print(f"version {manifest.version}: {manifest.num_rows} rows quantized, off by {error:.0e} at most")

    anew = build()
    anew.embedding_bags["item"].weight = nn.Parameter(tracker.read_rows("embedding_bags.item"))
    assert memory(served).equal(memory(quantize(anew)))
    print(f"all {memory(served).numel():,} bytes equal those of the trainer's table, newly quantized")
    publisher.close()
    dist.destroy_process_group()


def build() -> EmbeddingBagCollection:
    """Return a collection with one table."""
    config = EmbeddingBagConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])
    return EmbeddingBagCollection(tables=[config])


def quantize(collection: EmbeddingBagCollection) -> nn.Module:
    """Return the int8 inference module of a float collection."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        return quantize_inference_model(nn.Sequential(collection), quantization_dtype=torch.qint8)


def memory(model: nn.Module) -> Tensor:
    """Return the bytes of the only quantized table: codes, scales and biases."""
    weights: Tensor = model.state_dict()["0.embedding_bags.item.weight"]
    return weights


def batch(generator: torch.Generator, size: int = 64) -> KeyedJaggedTensor:
    """Return a batch with one random item per example."""
    ids = torch.randint(0, NUM_ROWS, (size,), generator=generator)
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(size, dtype=torch.int64))


if __name__ == "__main__":
    main()
