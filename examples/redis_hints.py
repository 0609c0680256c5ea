"""Send hints over Redis: a predictor that polls the store twice a minute applies each version within milliseconds.

Shows the time from commit to applied. A hint only triggers a poll of the store. If Redis is down, the same program
works, but takes up to half a minute per version. Run it:
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
from delta_tracker.stream.notify.redis_hints import RedisNotifier

POLL_SECONDS = 30.0
TABLE = "embedding_bags.item"


def main(redis_url: str) -> None:
    """Publish versions and wait until the predictor has applied each."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=8, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    url = f"file://{tempfile.mkdtemp()}"
    publisher = Publisher(tracker, url, notifier=RedisNotifier(redis_url))
    publisher.snapshot()
    served = torch.empty(1000, 8)
    with Predictor({TABLE: served}, url) as predictor:
        # usually in its own process, so it has its own connection
        predictor.follow(poll_seconds=POLL_SECONDS, notifier=RedisNotifier(redis_url))
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
    print(f"the predictor equals the trainer, and never waited for its next poll after {POLL_SECONDS:.0f} s")
    dist.destroy_process_group()


def wait_for(predictor: Predictor, version: int) -> None:
    """Wait until a version is applied; after a lost hint, that is at the next poll."""
    while predictor.version != version:
        if predictor.error is not None:
            raise predictor.error
        time.sleep(0.001)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("redis_url", help="redis://host:port/db")
    main(parser.parse_args().redis_url)
