"""Publish from a trainer and follow in another process, which does not need torchrec.

Shows a serving model of plain torch whose names differ from the trainer's, and dense parameters of the same cut.
Run it: ``python -m examples.publish_and_predict``, which starts
``python -m examples.publish_and_predict file:///stream VERSION`` as its predictor.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time

import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher

NUM_USERS, COLUMNS, NUM_DELTAS = 1000, 8, 5
# names in the stream (the trainer's) to names in the serving model
NAMES = {"0.embedding_bags.user": "users", "1.weight": "score.weight", "1.bias": "score.bias"}


class Server(nn.Module):
    """Serving model of plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(NUM_USERS, COLUMNS, mode="sum", include_last_offset=True)
        self.score = nn.Linear(COLUMNS, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return a score per bag of ids."""
        return self.score(self.users(ids, offsets))


def predict(url: str, last: int) -> None:
    """Follow the stream up to version ``last``."""
    server = Server()
    with Predictor(ModelTarget(server, names=NAMES), url) as predictor:
        predictor.follow()
        shown = None
        while shown != last:
            with predictor.reading() as held:  # no row changes inside this block
                score = server(torch.arange(4), torch.tensor([0, 4])).item()
            if held.version != shown and held.version is not None:
                shown = held.version
                print(f"predictor: version {shown}, score {score:+.4f}", flush=True)
            time.sleep(0.001)
        if predictor.error is not None:
            raise predictor.error
    assert "torchrec" not in sys.modules
    print(digest([server.users.weight, server.score.weight, server.score.bias]))


def train(url: str) -> None:
    """Publish a snapshot and deltas, and compare the predictor's final rows with the trainer's."""
    import torchrec  # noqa: PLC0415  the predictor's process does not need it
    from torch import distributed as dist  # noqa: PLC0415
    from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: PLC0415

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = torchrec.EmbeddingBagConfig(
        name="user", num_embeddings=NUM_USERS, embedding_dim=COLUMNS, feature_names=["user"]
    )
    collection = torchrec.EmbeddingBagCollection(tables=[config])
    # the collection returns a keyed tensor, so the linear layer is called separately
    model = DistributedModelParallel(nn.Sequential(collection, nn.Linear(COLUMNS, 1)), device=torch.device("cpu"))
    collection, dense = model.module
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url, dense=dense)
    publisher.snapshot()

    last = publisher.version + NUM_DELTAS
    program = [sys.executable, "-m", "examples.publish_and_predict", url, str(last)]
    predictor = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    for first in range(NUM_DELTAS):
        ids = torch.arange(first, first + 100)
        features = torchrec.KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([50, 50]))
        dense(collection(features).values()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker.step()
        manifest = publisher.publish()
        print(f"trainer: version {manifest.version}, {manifest.num_rows} rows, {manifest.num_bytes} bytes", flush=True)
    publisher.close()

    *lines, found = predictor.communicate(timeout=240)[0].splitlines()
    print("\n".join(lines))
    assert predictor.returncode == 0
    assert found == digest([tracker.read_rows("0.embedding_bags.user"), dense.weight, dense.bias])
    print("the predictor's table and dense parameters equal the trainer's bit for bit")
    dist.destroy_process_group()


def digest(tensors: list[Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes."""
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", help="stream to follow as the predictor; omit it for the trainer")
    parser.add_argument("last", nargs="?", type=int, help="version at which the predictor stops")
    arguments = parser.parse_args()
    if arguments.url:
        predict(arguments.url, arguments.last)
    else:
        train(f"file://{tempfile.mkdtemp()}")
