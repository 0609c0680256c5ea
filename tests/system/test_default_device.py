"""The library chooses the device of each of its tensors, whatever ``torch.set_default_device()`` says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage, TrackingMode
from delta_tracker.publisher.host_copies import HostCopier, SelectedRows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.tracker.top_k import TopK
from tests.fake_streams.simulation import fake_streams


@pytest.fixture
def _default() -> Iterator[None]:
    with torch.device("meta"):  # what torch.set_default_device() enters
        yield


@pytest.mark.usefixtures("_default")
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("engine", ["torch", None])
def test_a_stream_has_the_rows_of_training(engine: str | None, is_sparse: bool, tmp_path) -> None:
    model = nn.Sequential(nn.Embedding(40, 4, sparse=is_sparse, device="cpu"), nn.Linear(4, 2, device="cpu"))
    served = nn.Sequential(nn.Embedding(40, 4, device="cpu"), nn.Linear(4, 2, device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storage = Storage(f"file://{tmp_path}")
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, engine=engine) as tracker:
        publisher = Publisher(tracker, storage, top_k=TopK(100), dense=model)
        predictor = Predictor(served, storage)
        for kind in ("snapshot", "publish", "publish"):
            model(torch.randint(0, 40, (10,), device="cpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.step()
            getattr(publisher, kind)()
            predictor.sync()
            for name, tensor in model.state_dict().items():
                assert torch.equal(served.state_dict()[name], tensor), name
        publisher.close()
        assert tracker.num_hook_errors == 0


def test_marks_and_copies_of_a_device_use_pinned_memory() -> None:
    with fake_streams(0), torch.device("cuda"):
        stores = {fqn: SegmentStore(40, "cuda", engine="torch") for fqn in "tu"}
        log = ChangeLog(stores, ["a"], delete_on_read=True, max_bytes=None)
        ids = torch.tensor([3, 5, 3], device="cpu").pin_memory().to("cuda", non_blocking=True)
        log.writes.begin_write(0, dict.fromkeys(stores, ids))
        log.writes.end_write(0, dict.fromkeys(stores, ids))
        rows = log.consumers.read("a").rows
        selected = [SelectedRows(each.ids) for each in rows.values()]
        for each in HostCopier().copy(selected):
            each.result()
        assert [each.copied.tolist() for each in selected] == [[3, 5], [3, 5]]
