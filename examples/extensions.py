"""Minimal implementations of three extension points: a table, a transport for hints, and a sink of the monitor.

The predictor writes to a key-value store, receives hints through a file, and writes its metrics to a CSV file. Run it:
``python -m examples.extensions``
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, RowTarget, monitor
from delta_tracker.monitor.collection_report import CollectionReport
from delta_tracker.monitor.sinks.base_sink import Sink

NUM_ROWS, COLUMNS = 1000, 8
TABLE = "embedding_bags.item"


class KeyValueTable(RowTarget):
    """Rows stored as bytes by id, as in RocksDB or Redis; here in a dict."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self.num_rows, self.dim, self.dtype = num_rows, dim, torch.float32
        self.rows, self.columns = (0, num_rows), ((0, dim),)  # the whole table
        self.needs_whole_rows = True  # a value of the store is a whole row
        self.store: dict[int, bytes] = {}

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        """Write rows; ``columns`` are always all columns."""
        del columns
        keys = range(ids.start, ids.stop) if isinstance(ids, slice) else ids.tolist()
        self.store.update(zip(keys, (row.tobytes() for row in values.numpy()), strict=True))


class FileNotifier:
    """Hints through files on a shared disk: the file of a stream contains its newest version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def announce(self, stream: str, version: int) -> None:
        """Replace the file atomically, so that no reader sees a part of it."""
        draft = self.folder / f"{stream}.draft"
        draft.write_text(str(version))
        draft.replace(self.folder / stream)

    def wait(self, stream: str, after: int, timeout_seconds: float) -> bool:
        """Poll the file until its version is above ``after``. Errors may be raised: the caller handles them."""
        deadline, file = time.monotonic() + timeout_seconds, self.folder / stream
        while not (file.exists() and int(file.read_text()) > after):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Do nothing: no file is kept open."""


class CsvSink(Sink):
    """Sink that writes one line per value of each window."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def deliver(self, collection: CollectionReport) -> None:
        """Write the windows of a collection."""
        for window in collection.windows:
            for aggregation, figure in window.values.items():
                self._file.write(f"{collection.time_ns},{window.definition.name},{aggregation},{figure}\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def main() -> None:
    """Train and publish one version with all three extensions."""
    folder = Path(tempfile.mkdtemp())
    url, notifier = f"file://{folder}/stream", FileNotifier(folder)
    monitor.start([CsvSink(folder / "metrics.csv")], interval=timedelta(seconds=1), system=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"])
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)

    publisher = Publisher(tracker, url, notifier=notifier)
    publisher.snapshot()
    served = KeyValueTable(NUM_ROWS, COLUMNS)
    with Predictor({TABLE: served}, url) as predictor:
        predictor.follow(poll_seconds=30, notifier=notifier)  # hints make it faster than the polling interval
        features = KeyedJaggedTensor(["item"], torch.arange(100), lengths=torch.ones(100, dtype=torch.int64))
        model(features).values().sum().backward()
        tracker.step()
        manifest = publisher.publish()
        while predictor.version != manifest.version:
            time.sleep(0.001)
    trained = tracker.read_rows(TABLE).numpy()
    assert served.store == {row: trained[row].tobytes() for row in range(NUM_ROWS)}
    print(f"version {manifest.version}, {manifest.num_rows} rows: the store equals the trainer bit for bit")
    publisher.close()
    monitor.stop()
    assert ",delta_tracker_applied_versions," in (folder / "metrics.csv").read_text()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
