"""Programs of the test with two hosts: ``python -m tests.system.two_hosts_cases train|serve DIRECTORY OPTIONS``."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher
from delta_tracker.errors import RankFailedError, StorageError
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.servers import S3, wait_until_written

_logger = logging.getLogger(__name__)

URL = "s3://tests/stream"
_TIMEOUT = timedelta(seconds=60)


def _write(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def train(directory: Path, options: dict[str, str]) -> None:
    """Train and publish until there is a file ``stop``; write the tables of the last version to files."""
    from tests.models import Spec, batch, shard  # noqa: PLC0415
    from tests.predictor.serving_cases import whole_tables  # noqa: PLC0415  the other host needs no torchrec

    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank = dist.get_rank()
    if rank == 0:
        wait_until_written(S3("s3://tests", options))
    dist.barrier()
    spec = Spec.every_sharding(dist.get_world_size(), local_size=1)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    num_failed = 0
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, Storage(URL, options=options), timeout=_TIMEOUT)
        version, is_last = None, False
        while version is None or not is_last:
            stops = torch.tensor((directory / "stop").exists())
            dist.broadcast(stops, 0)
            if not is_last:
                model(batch(spec, generator)).backward()
                tracker.step()
            is_last = bool(stops)
            try:
                version = publisher.publish().version
            except (StorageError, RankFailedError) as error:
                _logger.warning("not published: %s", error)
                version, num_failed = None, num_failed + 1
        tables = whole_tables(model)
        dist.barrier()
        publisher.close()
    if rank == 0:
        torch.save(tables, directory / "expected.pt")
        _write(directory / "end.json", {"version": version, "failed": num_failed})
    dist.barrier()
    dist.destroy_process_group()


def serve(directory: Path, options: dict[str, str]) -> None:
    """Follow until the trainers' last version; print the status all the time, and write the tables to files."""
    storage = Storage(URL, options=options)
    while True:
        try:
            snapshot = StreamLog(storage).newest_snapshot()
        except StorageError:
            snapshot = None
        if snapshot is not None:
            break
        time.sleep(0.1)
    model = {fqn: torch.full((spec.num_rows, spec.dim), -1.0) for fqn, spec in snapshot.tables.items()}
    with Predictor(model, storage, name="host-2") as predictor:
        predictor.follow()
        end = None
        while end is None or predictor.version != end:
            _write(directory / "progress.json", {"version": predictor.version, "error": str(predictor.error)})
            if (directory / "end.json").exists():
                end = json.loads((directory / "end.json").read_text())["version"]
            time.sleep(0.05)
    torch.save(model, directory / "found.pt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    {"train": train, "serve": serve}[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
