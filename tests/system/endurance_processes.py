"""Trainers and predictors of the endurance run, each in a process that may be killed at any time.

A trainer restores the head of the stream, publishes as fast as it can, and records digests of its rows now and then. A
predictor follows, looks rows up all the time, and compares its rows with these digests.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Recovery, Upkeep
from delta_tracker.errors import NotRecoverableError, RankFailedError, StorageError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.recovery.restore import restore
from delta_tracker.stream.maintenance.retention import Retention
from tests.models import Spec, Table, batch, shard

TIMEOUT = timedelta(seconds=30)
_ROWS, _DIM = 50_000, 16
_BAGS, _LONGEST = 64, 3
_BATCHES_PER_LOOK = 50  # after which the ranks agree whether to end, and whether to record digests
_RECORD_SECONDS = 5.0
_PLACE_SECONDS = 1.0
_WAIT_SECONDS = 0.005
_LOOKED_UP = 256


class Paths(NamedTuple):
    """Files of a run."""

    root: Path
    disk: Path
    """Directory of the stream, on a disk that is full now and then."""

    @property
    def url(self) -> str:
        return f"file://{self.disk}/stream"

    @property
    def digests(self) -> Path:
        return self.root / "digests"

    @property
    def is_over(self) -> Path:
        """The trainer publishes once more and ends after this file exists."""
        return self.root / "is_over"

    @property
    def last(self) -> Path:
        """Last version, written by the trainer before it ends."""
        return self.root / "last"

    def events(self, name: str) -> Path:
        """File to which a process appends lines of JSON."""
        return self.root / f"{name}.jsonl"

    def committed(self, version: int) -> float:
        """Return when a version was committed, by the time of day."""
        return (self.disk / "stream" / "log" / f"{version:020d}.json").stat().st_mtime


def write(file: Path, text: str) -> None:
    """Replace a file as a whole."""
    draft = file.with_name(f"{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)


def digest(rows: Tensor) -> str:
    """Return a hash of the values of rows."""
    return xxhash.xxh3_128_hexdigest(rows.detach().contiguous().numpy().data)


class Trainer:
    """One rank of a trainer."""

    def __init__(self, paths: Paths, life: str, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        group = paths.root / f"group-{life}"
        dist.init_process_group(
            "gloo", init_method=f"file://{group}", rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        self._paths = paths
        self._spec = Spec(
            [
                Table("row", _ROWS, "row", dim=_DIM),
                Table("column", _ROWS, f"column:0,{world_size - 1}", dim=_DIM),
            ]
        )
        self._model = shard(self._spec)
        self._dense = self._model.module.dense
        self._optimizer = torch.optim.Adam(self._dense.parameters(), lr=0.01)
        self._tracker = ModelDeltaTracker(self._model, ["stream"])
        self._generator = torch.Generator().manual_seed(random.Random(f"{life} {rank}").getrandbits(31))

    def restore(self) -> int | None:
        """Restore the head of the stream; return its version, None for a new stream."""
        for _ in range(2):  # DDP fixes the order of its gradients after the second batch
            self._train()
        try:
            restored = restore(
                self._model,
                self._paths.url,
                tracker=self._tracker,
                recovery=Recovery(training_state={"optimizer": self._optimizer}),
                timeout=TIMEOUT,
            )
        except NotRecoverableError:
            return None
        return restored.version

    def train(self) -> None:
        """Publish until the run is over."""
        publisher = Publisher(
            self._tracker,
            self._paths.url,
            recovery=Recovery(training_state={"optimizer": self._optimizer}),
            dense=self._dense,
            cadence=Cadence(seconds=0.5, snapshot_every=100),
            upkeep=Upkeep(retention=Retention(versions=100, grace_seconds=20.0), compact_every=20),
            timeout=TIMEOUT,
        )
        due, is_over = time.monotonic() + _RECORD_SECONDS, False
        while not is_over:
            for _ in range(_BATCHES_PER_LOOK):
                self._train()
                self._tracker.step()
                publisher.step()
            is_over, is_due = self._agree(self._paths.is_over.exists(), time.monotonic() > due)
            if is_over or is_due:
                self._record(publisher, is_last=is_over)
                due = time.monotonic() + _RECORD_SECONDS
        publisher.close()
        dist.destroy_process_group()

    def check(self) -> None:
        """Check that the restored rows are those that a trainer recorded."""
        version = self.restore()
        recorded = recorded_blocks(self._paths, int(self._paths.last.read_text()))
        assert recorded, f"nothing is recorded of version {version}"
        for block in self._blocks():
            (found,) = (each for each in recorded if each[:4] == block[:4])
            assert found == block, f"restored version {version} differs: {found}, {block}"
        dist.destroy_process_group()

    def _train(self) -> None:
        self._optimizer.zero_grad()
        features = batch(self._spec, self._generator, _BAGS, _LONGEST)
        self._model(features).backward()
        self._optimizer.step()

    def _agree(self, *facts: bool) -> tuple[bool, ...]:
        """Return what rank 0 sees."""
        tensor = torch.tensor(facts)
        dist.broadcast(tensor, 0)
        return tuple(tensor.tolist())

    def _record(self, publisher: Publisher, *, is_last: bool) -> None:
        """Publish everything, and write digests of this rank's rows as of that version."""
        while True:
            try:
                manifest = publisher.publish()
            except (RankFailedError, StorageError):  # the disk is full
                if not is_last:
                    return
                time.sleep(0.5)
                continue
            break
        folder = self._paths.digests / str(manifest.version)
        folder.mkdir(parents=True, exist_ok=True)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        record = {"ranks": world_size, "blocks": list(self._blocks())}
        write(folder / str(rank), json.dumps(record))
        dist.barrier()
        if is_last and rank == 0:
            write(self._paths.last, str(manifest.version))
        if not is_last:
            time.sleep(0.3)  # so that predictors hold this version for a moment

    def _blocks(self) -> Iterator[list[Any]]:
        """Yield the first row, the columns and the digest of each block of rows of this rank, and dense tensors."""
        for fqn, spec in self._tracker.shards.items():
            for (first, end), view in zip(spec.columns, self._tracker.live.column_views(fqn), strict=True):
                yield [fqn, spec.row_offset, first, end, len(view), digest(view)]
        if dist.get_rank() == 0:
            for name, tensor in self._dense.named_parameters():
                yield [f"dense.{name}", 0, 0, 0, 0, digest(tensor)]


def recorded_blocks(paths: Paths, version: int) -> list[list[Any]]:
    """Return the blocks of all ranks of a version; empty if a rank has not recorded it (yet)."""
    records = [
        json.loads(file.read_text())
        for file in (paths.digests / str(version)).glob("*")
        if not file.name.endswith(".draft")
    ]
    if not records or len(records) < records[0]["ranks"]:
        return []
    return [block for record in records for block in record["blocks"]]


class Server:
    """A predictor that serves lookups.

    Args:
        paths: files of the run.
        name: name of the predictor.
        survives: True if its tables and its position are files that its successor continues with.
    """

    def __init__(self, paths: Paths, name: str, *, survives: bool) -> None:
        torch.set_num_threads(1)
        self._paths, self._name, self._survives = paths, name, survives
        self._place = paths.root / f"{name}.place.json"
        self._tables = self._kept() if survives else {key: torch.zeros(shape) for key, shape in _shapes().items()}
        self._predictor = Predictor(self._tables, paths.url, name=name)
        if survives and self._place.exists():
            self._predictor.load_state_dict(json.loads(self._place.read_text()))
        # Tables that survived a kill may have rows that are newer than their position, so older versions do not count.
        self._first = self._head() + 1 if survives else 0
        self._seen: int | None = None
        self._compared: set[int] = set()
        self._num_lookups = 0

    def serve(self) -> None:
        """Look rows up until the last version is compared."""
        self._predictor.follow(poll_seconds=0.05)
        due = time.monotonic()
        with self._paths.events(self._name).open("a", buffering=1) as events:
            while True:
                event = self._look_up()
                if event:
                    print(json.dumps(event), file=events)
                if self._survives and time.monotonic() > due:
                    write(self._place, json.dumps(self._predictor.state_dict()))
                    due = time.monotonic() + _PLACE_SECONDS
                if self._paths.last.exists() and int(self._paths.last.read_text()) in self._compared:
                    break
                time.sleep(_WAIT_SECONDS)
        resyncs = self._predictor.status().resyncs
        self._predictor.stop()
        with self._paths.events(self._name).open("a") as events:
            print(json.dumps({"lookups": self._num_lookups, "resyncs": resyncs}), file=events)

    def _look_up(self) -> Mapping[str, Any]:
        """Look rows up; return the latency of a version that is new here, and whether it was compared."""
        with self._predictor.reading() as served:
            ids = torch.randint(_ROWS, (_LOOKED_UP,))
            for fqn in _TABLES:
                assert self._tables[fqn][ids].equal(self._tables[fqn][ids]), "a row changed inside reading()"
            self._num_lookups += 1
            version = served.version
            if version is None or served.applying is not None:
                return {}
            event: dict[str, Any] = {}
            if version != self._seen:
                if self._seen is not None:  # the first version may have waited for this predictor
                    event |= self._latency(version)
                self._seen = version
            if version >= self._first and version not in self._compared and self._compare(version):
                self._compared.add(version)
                event |= {"compared": version}
        return event

    def _latency(self, version: int) -> dict[str, float]:
        try:
            return {"at": time.time(), "version": version, "latency": time.time() - self._paths.committed(version)}
        except FileNotFoundError:  # retention has deleted it
            return {"at": time.time(), "version": version}

    def _compare(self, version: int) -> bool:
        """Compare the tables with the digests of a version, if it has any."""
        blocks = recorded_blocks(self._paths, version)
        for fqn, row, first, end, num_rows, expected in blocks:
            table = self._tables[fqn]
            found = table[row : row + num_rows, first:end] if num_rows else table
            assert digest(found) == expected, f"{fqn} of {self._name} differs at version {version}"
        return bool(blocks)

    def _head(self) -> int:
        """Return the newest version of the stream, -1 for an empty one."""
        return max((int(file.stem) for file in (self._paths.disk / "stream" / "log").glob("*.json")), default=-1)

    def _kept(self) -> dict[str, Tensor]:
        """Map the tables in files, which survive a kill."""
        folder = self._paths.root / f"{self._name}.tables"
        folder.mkdir(exist_ok=True)
        return {
            key: torch.from_file(str(folder / key), shared=True, size=torch.Size(shape).numel()).view(shape)
            for key, shape in _shapes().items()
        }


_TABLES = ("ec.embeddings.row", "ec.embeddings.column")


def _shapes() -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(_TABLES, (_ROWS, _DIM)) | {"dense.weight": (1, _DIM), "dense.bias": (1,)}
