"""Lookups on CUDA streams see whole versions of rows, in every order in which the streams may run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.predictor.model_writer import ModelWriter
from delta_tracker.predictor.status import Served
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.storage.storage import Storage
from tests.fake_streams.cuda import FakeDevices
from tests.fake_streams.simulation import fake_streams
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE

_ORDERS = 1000 if SWEEPS_ARE_WHOLE else 16
_ROWS, _DIM = 6, 4
_CUDA = torch.device("cuda", 0)
_NUM_VERSIONS = 4


@pytest.fixture(scope="module")
def stream() -> tuple[Storage, dict[int, Tensor]]:
    """A stream in which every version changes most rows, and the table of each version."""
    storage = Storage("memory://")
    writer = Writer(storage, num_rows=_ROWS, dim=_DIM)
    tables = {}
    for number in range(_NUM_VERSIONS):
        writer.table.copy_(torch.arange(_ROWS * _DIM).view(_ROWS, _DIM) + 100.0 * (number + 1))
        writer.dense["w"] = torch.full((5,), float(number))
        manifest = writer.snapshot() if number == 0 else writer.write("delta", [writer.rows([0, 1, 3, 4, 5])])
        if number:
            writer.table[2] = tables[manifest.version - 1][2]
        tables[manifest.version] = writer.table.clone()
    return storage, tables


class _Looked(TensorTarget):
    """A table that is looked up between the chunks of a version too."""

    look: Any = None

    def prepare(self, values: Tensor, columns: tuple[int, int]) -> Tensor:
        if self.look is not None:
            self.look()
        return super().prepare(values, columns)


class _Service:
    """A predictor on a device, and the lookups of several threads, each with a stream of its own.

    The threads are simulated: what matters is the order on the device, and the lock of the host is free in between.
    """

    def __init__(self, storage: Storage, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = torch.full((_ROWS, _DIM), -1.0, device=_CUDA)
        self.dense = torch.full((5,), -1.0, device=_CUDA)
        self.target = _Looked.of(self.table)
        self.predictor = Predictor(ModelTarget({FQN: self.target, "w": self.dense}, chunk_rows=2), storage)
        torch.cuda.synchronize()
        self.target.look = self.look
        self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.seen: list[tuple[Served, Any, list[Tensor]]] = []

    def look(self) -> None:
        """Launch lookups of all rows, twice."""
        if self.random.random() < 0.5:
            return
        stream = self.random.choice(self.streams)
        named = [stream] if self.random.random() < 0.5 else []
        outer, inner = (torch.cuda.stream(each) for each in ([None, stream] if named else [stream, None]))
        with outer, self.predictor.reading(*named) as served, inner:
            found = [self.table[1:].clone(), self.dense + 0, self.table.index_select(0, _ids()), self.dense + 0]
        self.seen.append((served, stream, found))

    def run(self) -> None:
        for _ in range(_NUM_VERSIONS):
            self.look()
            with torch.cuda.stream(self.random.choice(self.streams)):
                self.predictor.sync(limit=1)
            self.look()

    def check(self, tables: dict[int, Tensor]) -> None:
        for served, stream, found in self.seen:
            with torch.cuda.stream(stream):
                first, dense, second, later = (each.cpu() for each in found)
            assert torch.equal(first, second[1:]), "rows changed inside reading()"
            assert torch.equal(dense, later), "dense tensors changed inside reading()"
            old = tables.get(served.version, torch.full((_ROWS, _DIM), -1.0))
            new = tables.get(served.applying, old)
            for row, before, after in zip(second, old, new, strict=True):
                assert torch.equal(row, before) or torch.equal(row, after), "a torn row"
            assert dense.tolist() == [-1.0 if served.version is None else served.version - min(tables)] * 5
        with self.predictor.reading():
            assert torch.equal(self.table.cpu(), tables[max(tables)])


def _ids() -> Tensor:
    return torch.arange(_ROWS, device=_CUDA)


def _serve(stream: tuple[Storage, dict[int, Tensor]], seed: int) -> FakeDevices:
    storage, tables = stream
    with fake_streams(seed) as devices:
        service = _Service(storage, seed)
        service.run()
        service.check(tables)
    return devices


@pytest.mark.sweep("long")
def test_lookups_on_streams_see_no_torn_rows(stream: Any) -> None:
    for seed in range(_ORDERS):
        _serve(stream, seed)


@pytest.mark.advice("InvalidArgumentError: TableFence.enter_reading")
def test_a_stream_of_a_device_without_tables_is_refused(stream: Any) -> None:
    with fake_streams(0):
        predictor = Predictor({FQN: torch.full((_ROWS, _DIM), -1.0), "w": torch.zeros(5)}, stream[0])
        with (
            pytest.raises(InvalidArgumentError, match="devices of the tables: none"),
            predictor.reading(torch.cuda.Stream()),
        ):
            pass
        with predictor.reading():
            predictor.status()


@pytest.mark.sweep("long")
def test_a_table_that_moves_to_the_device_is_not_written_during_lookups(stream: Any) -> None:
    storage, tables = stream
    for seed in range(_ORDERS):
        with fake_streams(seed):
            model = {FQN: torch.full((_ROWS, _DIM), -1.0), "w": torch.zeros(5)}
            predictor = Predictor(model, storage)
            first = predictor.sync(limit=1)
            model[FQN] = model[FQN].to(_CUDA)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side), predictor.reading():
                seen = model[FQN] + 0
            predictor.sync(limit=1)
            torch.cuda.current_stream().synchronize()
            with torch.cuda.stream(side):
                assert torch.equal(seen.cpu(), tables[first])


@pytest.mark.sweep("long")
def test_writes_on_different_streams_are_ordered(stream: Any) -> None:
    storage, tables = stream
    for seed in range(_ORDERS):
        with fake_streams(seed):
            table, dense = torch.zeros(_ROWS, _DIM, device=_CUDA), torch.zeros(5, device=_CUDA)
            predictor = Predictor({FQN: table, "w": dense}, storage)
            for _ in range(2):
                with torch.cuda.stream(torch.cuda.Stream()):
                    version = predictor.sync(limit=1)
            torch.cuda.synchronize()
            assert torch.equal(table.cpu(), tables[version])
            assert dense.tolist() == [1] * 5


def test_writes_wait_for_no_device_and_copy_no_pageable_memory(stream: Any) -> None:
    storage, _ = stream
    with fake_streams(0) as devices:
        predictor = Predictor({FQN: torch.zeros(_ROWS, _DIM, device=_CUDA), "w": torch.zeros(5, device=_CUDA)}, storage)
        before = devices.num_waits, devices.num_pageable
        predictor.sync(limit=1)
        assert (devices.num_waits, devices.num_pageable) == before
        with predictor.reading():
            pass
        assert devices.num_waits == before[0]


def test_queued_writes_are_bounded(stream: Any) -> None:
    storage, _ = stream
    with fake_streams(0) as devices:
        devices.scheduler._eagerness = 0.0
        predictor = Predictor(
            ModelTarget({FQN: torch.zeros(_ROWS, _DIM, device=_CUDA), "w": torch.zeros(5, device=_CUDA)}, chunk_rows=1),
            storage,
        )
        predictor.sync()
        queued = torch.cuda.default_stream().queue.pending
        assert 0 < len(queued) < 100, "more than a few of 25 writes are queued, with about 10 operations each"
        assert devices.num_waits > 1


def test_reading_records_nothing_on_the_cpu(stream: Any) -> None:
    storage, _ = stream
    with fake_streams(0):
        predictor = Predictor({FQN: torch.zeros(_ROWS, _DIM), "w": torch.zeros(5)}, storage)
        predictor.sync()
        with predictor.reading():
            pass
        assert torch.cuda.default_stream().query()
        writer = predictor._destination
        assert isinstance(writer, ModelWriter)
        assert not writer.fence.devices
        assert not writer.fence._read
