"""Export your own metrics and the library's at an endpoint that Prometheus scrapes.

Shows each kind of metric, labels, a callback that runs at each collection, an event, and the output of the endpoint.
Run it: ``python -m examples.own_metrics --keep``, then ``curl http://127.0.0.1:9464/metrics`` in another terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import urllib.request
from datetime import timedelta

import torch
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Publisher, monitor
from delta_tracker.monitor.sinks.prometheus import PrometheusSink

NUM_BATCHES, BATCH = 20, 8
SHOWN = ("training_", "delta_tracker_published_")


def main(port: int, *, keep: bool) -> None:
    """Train, record metrics, and fetch the endpoint as Prometheus does."""
    examples = monitor.counter("training.examples", "Examples seen.", labels=("split",))
    loss = monitor.stat("training.loss", "Loss of a batch.", window=monitor.Window(count=10))
    seconds = monitor.histogram("training.step_seconds", "Time of a step.", unit="seconds")
    rate = monitor.gauge("training.learning_rate", "Learning rate.")
    seen: set[int] = set()
    monitor.passive("training.different_items", lambda: len(seen), "Items seen so far.")  # called at each collection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=8, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    sink = PrometheusSink(port)
    monitor.start([sink], interval=timedelta(seconds=1), attributes={"job": "trainer"}, system=False)
    publisher = Publisher(tracker, f"file://{tempfile.mkdtemp()}")
    rate.set(0.1)
    for step in range(NUM_BATCHES):
        monitor.step(step)
        features = batch(step)
        seen.update(features.values().tolist())
        with seconds.time():
            error = model(features).values().square().mean()
            error.backward()
            tracker.step()
        loss.add(error.detach())
        examples.cell(split="train").add(BATCH)
    monitor.log("training.published", "by hand", version=publisher.publish().version)
    publisher.close()
    monitor.flush()  # the endpoint has the last collection; without flush() there is one per second

    address = f"http://127.0.0.1:{sink.port}/metrics"
    with urllib.request.urlopen(address) as answer:
        lines = answer.read().decode().splitlines()
    for line in lines:
        if line.startswith(SHOWN) and "_bucket" not in line:
            print(line)
    assert f'training_examples_total{{job="trainer",split="train"}} {BATCH * NUM_BATCHES:.1f}' in lines
    assert f'training_step_seconds_count{{job="trainer"}} {NUM_BATCHES:.1f}' in lines
    if keep:
        print(f"curl {address}    (stop with Ctrl-C)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    monitor.stop()
    dist.destroy_process_group()


def batch(step: int) -> KeyedJaggedTensor:
    """Return a batch of consecutive items."""
    return KeyedJaggedTensor(["item"], torch.arange(step, step + BATCH), lengths=torch.ones(BATCH, dtype=torch.int64))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9464, help="port of the endpoint; 0 for any free port")
    parser.add_argument("--keep", action="store_true", help="serve the endpoint until Ctrl-C")
    arguments = parser.parse_args()
    main(arguments.port, keep=arguments.keep)
