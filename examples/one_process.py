"""Use the tracker alone, in one process: read the rows that training changed since the last read.

Shows that evaluation is not an update, that an uncommitted read loses nothing, and that consumers are independent. Run
it: ``python -m examples.one_process``
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, TrackingMode

TABLE = "embedding_bags.user"  # the name in state_dict without .weight


def main() -> None:
    """Train three batches, evaluate one, and read the changed rows."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build_model()
    tracker = ModelDeltaTracker(model, consumers=["stream", "audit"], mode=TrackingMode.EMBEDDING)

    for batch in ([7, 42, 7], [42], [900]):
        model(users(batch)).values().sum().backward()  # the fused optimizer updates the rows here
        tracker.step()
    with torch.no_grad():
        model(users([1, 2, 3]))

    delta = tracker.get_delta("stream", with_values=True, commit=False)
    rows = delta[TABLE]
    assert rows.values is not None
    assert rows.states is not None
    print(f"batches {delta.batches} changed {delta.num_rows} of {tracker.tables[TABLE].num_rows} rows:")
    for row, before, now in zip(rows.global_ids.tolist(), rows.states, rows.values, strict=True):
        print(f"  row {row}: {before[0]:+.4f} -> {now[0]:+.4f} in its first column")
    assert rows.global_ids.tolist() == [7, 42, 900]

    # After a crash before the commit, the next read returns the same rows.
    again = tracker.get_delta("stream", commit=False)
    assert again[TABLE].ids.equal(rows.ids)
    tracker.commit(again)
    assert tracker.get_delta("stream").num_rows == 0

    print(f"'stream' has received them; {tracker.num_pending('audit')[TABLE]} rows are pending for 'audit'")
    assert tracker.get_delta("audit").num_rows == 3  # noqa: PLR2004
    tracker.detach()
    dist.destroy_process_group()


def build_model() -> DistributedModelParallel:
    """Return a model with one table of 1000 users, sharded on this process."""
    config = EmbeddingBagConfig(name="user", num_embeddings=1000, embedding_dim=16, feature_names=["user"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return DistributedModelParallel(collection, device=torch.device("cpu"))


def users(ids: list[int]) -> KeyedJaggedTensor:
    """Return a batch with one bag of ids."""
    return KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


if __name__ == "__main__":
    main()
