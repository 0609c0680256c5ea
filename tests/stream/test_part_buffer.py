"""Read buffers are reused across versions, but never while a view of them exists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from delta_tracker import Predictor, RowTarget
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.part_reader import Contents, PartBuffer
from delta_tracker.stream.storage.storage import Storage
from tests.stream.streams import FQN, Writer


def test_memory_is_reused() -> None:
    pool = PartBuffer().pool
    first = pool.allocate(1000).ctypes.data
    assert pool.allocate(1000).ctypes.data == first
    assert len(pool.allocate(1100)) == 1100
    assert pool.allocate(1100).ctypes.data == first, "a little more fits too"


def test_memory_is_freed_when_versions_become_small() -> None:
    pool = PartBuffer().pool
    pool.allocate(1 << 20)
    for _ in range(10):
        assert len(pool.allocate(0)) == 0
    assert pool.free_bytes >= 1 << 20, "a version without rows says nothing about the next"
    for _ in range(10):
        pool.allocate(1000)
    assert 1000 <= pool.free_bytes <= 4 * 1024


@pytest.mark.parametrize("keeps_tensor", [False, True])
def test_a_kept_view_keeps_its_bytes(keeps_tensor: bool) -> None:
    pool = PartBuffer().pool
    array = pool.allocate(1000)
    array[:] = 7
    address = array.ctypes.data
    view = torch.from_numpy(array[8:16]).view(-1)[2:] if keeps_tensor else array[3:5]
    del array
    array = pool.allocate(1000)
    array[:] = 8
    assert array.ctypes.data != address
    assert set(view.tolist()) == {7}


class _Keeper(RowTarget):
    """A table that keeps its arguments, against the contract."""

    num_rows, dim, dtype, rows, columns = 20, 4, torch.float32, (0, 20), ((0, 4),)

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor | slice, Tensor]] = []

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        self.kept.append((ids, values))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_what_a_table_keeps_of_a_version_outlives_the_next(scheme: str, tmp_path: Path) -> None:
    writer = Writer(Storage("memory://" if scheme == "memory" else tmp_path.as_uri(), create=scheme == "file"))
    writer.snapshot()
    keeper = _Keeper()
    predictor = Predictor({FQN: keeper}, writer.storage)
    wanted = []
    for ids in ([1, 2], [3, 4], [5, 6]):
        writer.delta(ids)
        wanted.append((ids, writer.table[ids]))
        predictor.sync()
    for (ids, values), (kept_ids, kept_values) in zip(wanted, keeper.kept[1:], strict=True):
        assert isinstance(kept_ids, Tensor)
        assert kept_ids.tolist() == ids
        assert torch.equal(kept_values, values)


def test_a_version_that_grows_and_shrinks_keeps_little_memory() -> None:
    pool = PartBuffer().pool
    for size in [*range(100_000, 200_000, 1000), *range(200_000, 100_000, -1000)]:
        pool.allocate(size)
    assert pool.free_bytes < 1 << 20


class _Addresses(RowTarget):
    """A table that records the addresses of its values."""

    num_rows, dim, dtype, rows, columns = 20, 4, torch.float32, (0, 20), ((0, 4),)

    def __init__(self) -> None:
        self.found: list[int] = []

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        self.found.append(values.data_ptr())


def test_a_predictor_reads_one_version_where_the_one_before_it_was(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri(), create=True))
    writer.snapshot()
    target = _Addresses()
    predictor = Predictor({FQN: target}, writer.storage)
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9]):
        writer.delta(ids)
        predictor.sync()
    assert len(target.found) == 4
    assert len(set(target.found[1:])) == 1


def test_two_versions_of_one_buffer_may_be_read_side_by_side(tmp_path: Path) -> None:
    writer = Writer(Storage(tmp_path.as_uri(), create=True))
    buffer = PartBuffer()
    held = []
    for ids in ([1, 2], [3, 4]):
        manifest = writer.delta(ids)
        held.append((Contents(writer.storage, manifest, buffer=buffer), writer.table[ids]))
    for contents, values in held:
        (rows,) = contents.listed
        assert torch.equal(rows.read(0, 2), values)


def test_a_read_into_too_little_memory_is_refused() -> None:
    storage = Storage("memory://")
    storage.put("a", [memoryview(b"12345")])
    with pytest.raises(InvalidArgumentError, match="out"):
        storage.read("a", max_bytes=5, out=np.empty(4, dtype=np.uint8))
    out = np.zeros(8, dtype=np.uint8)
    data = storage.read("a", max_bytes=8, out=out)
    assert data is not None
    assert data.tobytes() == b"12345"
    assert out.tobytes() == b"12345\0\0\0"
