"""Hints over Redis: a predictor that looks into the store twice a minute hears of each version at once.

Shows the time from commit to applied with hints, and that a hint is only a hint: the store alone says what exists, so
without Redis the same program would end in half a minute per version. Run it:
``python -m examples.redis_hints redis://127.0.0.1:6379/0``
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.stream.notify.redis import RedisNotifier

POLL_SECONDS = 30.0
TABLE = "embedding_bags.item"


def main(redis_url: str) -> None:
    """Publish, and wait for each version to arrive."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=8, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    url = f"file://{tempfile.mkdtemp()}"
    publisher = Publisher(tracker, url, notifier=RedisNotifier(redis_url))
    publisher.snapshot()
    served = torch.empty(1000, 8)
    # in life a process of its own, so it has its own connection
    with Predictor({TABLE: served}, url, notifier=RedisNotifier(redis_url)) as predictor:
        predictor.follow(poll_seconds=POLL_SECONDS)
        wait_for(predictor, publisher.version)
        for item in range(5):
            features = KeyedJaggedTensor(["item"], torch.tensor([item]), lengths=torch.tensor([1]))
            model(features).values().sum().backward()
            tracker.step()
            manifest = publisher.publish()
            wait_for(predictor, manifest.version)
            took = 1000 * (time.time() - manifest.created)
            print(f"version {manifest.version}: applied {took:.0f} ms after its commit")
        assert served.equal(tracker.read_rows(TABLE))
    publisher.close()
    print(f"the predictor equals the trainer, and never waited for its next look after {POLL_SECONDS:.0f} s")
    dist.destroy_process_group()


def wait_for(predictor: Predictor, version: int) -> None:
    """Wait until a version is applied; a hint that was lost costs the time to the next look."""
    while predictor.version != version:
        if predictor.error is not None:
            raise predictor.error
        time.sleep(0.001)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("redis_url", help="redis://host:port/db")
    main(parser.parse_args().redis_url)
