"""Publish to a bucket: S3, or another store with its protocol and support for If-None-Match.

Shows how to pass options to a store, the objects in the bucket, and a predictor that starts from them. Credentials come
from the options, or from the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Run it::

    python -m examples.s3 s3://bucket/prefix region=eu-central-1
    python -m examples.s3 s3://bucket/prefix endpoint=http://127.0.0.1:8333 allow_http=true region=us-east-1
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Retention, Storage, Upkeep

NUM_ROWS, COLUMNS = 10_000, 16
TABLE = "embedding_bags.item"


def main(url: str, options: dict[str, str]) -> None:
    """Publish to the bucket, sync a predictor, and list the objects."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    storage = Storage(url, options=options)
    # Raises UnsupportedStoreError for a store that lets two publishers create one object: it would lose versions.
    publisher = Publisher(tracker, storage, upkeep=Upkeep(retention=Retention(versions=100)))
    publisher.snapshot()
    served = torch.empty(NUM_ROWS, COLUMNS)
    predictor = Predictor({TABLE: served}, storage)

    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, NUM_ROWS, (100,), generator=generator)
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        model(features).values().sum().backward()
        tracker.step()
        manifest = publisher.publish()
        predictor.sync()
        print(f"version {manifest.version}: {manifest.num_rows} rows, {manifest.num_bytes} bytes")
    publisher.close()

    for folder in ("log", "parts"):
        objects = storage.objects(folder)
        print(f"{url}/{folder}: {len(objects)} objects, {sum(each.num_bytes for each in objects)} bytes")
    assert predictor.version == publisher.version
    assert served.equal(tracker.read_rows(TABLE))
    print("the predictor equals the trainer bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="s3://bucket/prefix")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of the store, with obstore's names")
    arguments = parser.parse_args()
    main(arguments.url, dict(option.split("=", 1) for option in arguments.options))
