"""Serve a model that AOTInductor compiled, and check it after every version.

Shows ``compile_package()`` for an exported model, and ``CompiledModel``, whose tensors are the predictor's model. A
model is exported and compiled once; its package has no values. Needs a C++ compiler::

    python -m examples.compiled
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.integrations.aot_inductor import CompiledModel, compile_package

NUM_USERS, NUM_ITEMS = 500, 2000


class Ranker(nn.Module):
    """Score of each item for a user's bag of items."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(NUM_USERS, 16, mode="sum", sparse=True)
        self.item = nn.Embedding(NUM_ITEMS, 16, sparse=True)
        self.over = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return ``[N, 1]`` scores for ``[N, K]`` users and ``[N]`` items."""
        scores: Tensor = self.over(torch.cat([self.user(users), self.item(items)], 1))
        return scores


def main() -> None:
    """Train, publish and serve in one process."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    inputs = torch.randint(0, NUM_USERS, (8, 3)), torch.randint(0, NUM_ITEMS, (8,))
    with torch.no_grad():  # the embeddings of an exported model have no gradients, sparse or not
        exported = torch.export.export(Ranker().eval(), inputs)
    package = compile_package(exported, folder / "ranker.pt2")

    trained, url = Ranker(), (folder / "stream").as_uri()
    tables = torch.optim.Adagrad([trained.user.weight, trained.item.weight], lr=0.1)
    dense = torch.optim.Adam(trained.over.parameters(), lr=0.01)
    tracker = ModelDeltaTracker(trained)
    publisher = Publisher(tracker, url, dense=trained.over)

    served = CompiledModel(package)
    predictor = Predictor(served.tensors, url)
    for _ in range(10):
        users, items = torch.randint(0, NUM_USERS, (8, 3)), torch.randint(0, NUM_ITEMS, (8,))
        for optimizer in (tables, dense):
            optimizer.zero_grad()
        nn.functional.mse_loss(trained(users, items), torch.ones(8, 1)).backward()  # type: ignore[no-untyped-call]
        for optimizer in (tables, dense):
            optimizer.step()
        tracker.step()
        publisher.publish()

        predictor.sync()  # a server calls predictor.follow() once instead
        with torch.no_grad(), predictor.reading():
            compiled, eager = served(users, items), trained(users, items)
        for name, tensor in trained.state_dict().items():
            assert torch.equal(served.tensors[name], tensor), name
        torch.testing.assert_close(compiled, eager)  # compiled code may add in another order
    publisher.close()
    print(f"{predictor.version} versions: all tensors of the compiled model equal the trainer's bit for bit")


if __name__ == "__main__":
    main()
