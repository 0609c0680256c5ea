"""The planned sizes of a version, and the planned reads of its parts, are those of a published one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from delta_tracker import Encoding
from delta_tracker.planning.forecast import version_size
from delta_tracker.planning.workload import Workload
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.planning.streams import Job, counting
from tests.stream.streams import Writer


@pytest.mark.parametrize(
    ("encoding", "share", "tolerance"),
    [(None, 0.001, 0.01), (None, 0.5, 0.01), (Encoding.INT8, 0.05, 0.01), (Encoding.INT4, 0.002, 0.05)],
)
def test_a_published_version_has_the_planned_sizes(
    tmp_path: Path, encoding: Encoding | None, share: float, tolerance: float
) -> None:
    storage = Storage(tmp_path.as_uri(), create=True)
    job = Job(storage, share, encoding=encoding)
    load = job.workload(encoding=encoding)
    for planned, manifest in (
        (version_size(load, "snapshot"), job.publish(snapshot=True)),
        (version_size(load, "delta"), job.publish()),
    ):
        assert planned.part_bytes == pytest.approx([part.num_bytes for part in manifest.parts], rel=tolerance)
        assert planned.entry_bytes == pytest.approx(storage.size(entry_name(manifest.version)), rel=0.05)
    job.publisher.close()


def test_dense_tensors_are_counted(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri(), create=True)
    job = Job(storage, 0.01)
    job.trained.register_buffer("mean", torch.zeros(100_000))
    job.publisher.close()
    again = Job(storage, 0.01, dense=["mean"], model=job.trained)
    planned = version_size(again.workload(dense_bytes=400_000), "snapshot")
    manifest = again.publish(snapshot=True)
    assert planned.part_bytes == pytest.approx([part.num_bytes for part in manifest.parts], rel=0.01)
    again.publisher.close()


@pytest.mark.parametrize("memory_bytes", [64 << 20, 1 << 20])
def test_parts_are_read_with_the_planned_requests(tmp_path: Path, memory_bytes: int) -> None:
    """A part that does not fit in the memory for parts is read twice, in pieces."""
    read: list[int] = []
    storage = counting(Storage(tmp_path), read)
    writer = Writer(storage.inner, num_rows=90_000, dim=64)
    manifest = writer.snapshot()
    load = Workload(tables=(writer.spec,), changed=0.01, seconds=60.0)
    planned = version_size(load, "snapshot").reads(memory_bytes)
    before = dict(storage.requests)
    for reader in read_parts(storage, manifest, memory_bytes=memory_bytes):
        for rows in reader.rows:
            for _ in rows.chunks(4096):
                pass
    made = {name: number - before[name] for name, number in storage.requests.items()}
    assert (planned.num_heads, made["write"], made["list"]) == (made["size"], 0, 0)
    # The last piece of the first read is kept.
    assert planned.num_gets == pytest.approx(made["read"], abs=1)
    assert planned.num_bytes == pytest.approx(sum(read), rel=0.01 if planned.num_gets == 1 else 0.2)


def test_each_rank_writes_its_share_of_the_rows() -> None:
    table = TableSpec("t", 1003, 8, torch.float32)
    load = Workload(tables=(table,), changed=0.1, seconds=60.0, ranks=4)
    alone = Workload(tables=(table,), changed=0.1, seconds=60.0)
    for kind in ("snapshot", "delta"):
        sizes = version_size(load, kind).part_bytes
        assert len(sizes) == 4
        assert sum(sizes) == pytest.approx(sum(version_size(alone, kind).part_bytes), rel=0.1)
    assert [load.rows_of_rank(table, rank) for rank in range(4)] == [(0, 251), (251, 502), (502, 753), (753, 1003)]
    few = Workload(tables=(TableSpec("t", 2, 8, torch.float32),), changed=0.1, seconds=60.0, ranks=4)
    assert len(version_size(few, "snapshot").part_bytes) == 2, "the other ranks have no rows"
    assert math.isclose(version_size(load, "snapshot").num_writes, 5)
