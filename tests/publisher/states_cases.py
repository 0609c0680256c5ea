"""Cases for versions with the states of the optimizers and the training state; each runs on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Recovery, TopK
from delta_tracker.errors import (
    DeltaTrackerError,
    IncompleteModelError,
    InvalidArgumentError,
    RankFailedError,
    UnfinishedStepError,
)
from delta_tracker.monitor import Monitor
from delta_tracker.publisher import training
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.recovery.restore import restore
from delta_tracker.sharding.interrupted import mark_complete, mark_incomplete
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import PartReader, read_training
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.monitor.figures import Figures
from tests.publisher.publishing_cases import empty_model

_Model = dict[str, list[Tensor]]  # table FQN to the values and each state of the whole table


class Trainer:
    """A rank's model in training, with fused and other tables."""

    def __init__(
        self, rank: int, world_size: int, url: str, *, optimizer: str = "RowWiseAdagrad", **kwargs: Any
    ) -> None:
        tables = [*Spec.every_sharding(world_size).tables, Table("replica", 7, "data")]
        self.spec = Spec(tables, bag=True, optimizer=optimizer)
        self.model = shard(self.spec)
        self.model.module.dense.register_buffer("rank", torch.tensor([rank]))
        self.optimizer = ordinary_optimizer(self.model, "Adam", lr=0.1)
        self.optimizer.save_param_groups(True)
        self.tracker = ModelDeltaTracker(self.model, kwargs.pop("consumers", None))
        self.generator = torch.Generator().manual_seed(rank)
        self.url = url
        self.consumer = "stream" if "stream" in self.tracker.consumers else None
        self.publisher = self.publish_to(url, **kwargs)

    def publish_to(self, url: str, *, rank_state: Mapping[str, Any] | None = None, **kwargs: Any) -> Publisher:
        recovery = Recovery(training_state={"dense": self.optimizer}, rank_state=rank_state or {})
        return Publisher(self.tracker, url, self.consumer, **{"recovery": recovery, **kwargs})

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(batch(self.spec, self.generator)).backward()
        self.optimizer.step()
        self.tracker.step()

    def close(self) -> None:
        self.publisher.close()
        self.tracker.detach()

    def check(self) -> list[Manifest]:
        """Check that the stream's newest rows and states are those of this rank; return its entries."""
        entries, held = read_stream(self.url)
        for fqn, spec in self.tracker.shards.items():
            rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
            table = entries[-1].states.get(fqn)
            assert (table is None) == (fqn not in self.tracker.live.fused_tables)
            views = self.tracker.live.column_views(fqn)
            for (first, end), view, states in zip(spec.columns, views, self.tracker.live.state_views(fqn), strict=True):
                assert torch.equal(held[fqn][0][rows, first:end], view), fqn
                for number, state in enumerate(states):
                    assert table is not None
                    place = table.columns.index((first, end))
                    is_wide = table.states[number].width == "columns"
                    columns = slice(first, end) if is_wide else slice(place, place + 1)
                    assert torch.equal(held[fqn][1 + number][rows, columns], state), (fqn, number)
        return entries


def read_stream(url: str) -> tuple[list[Manifest], _Model]:
    """Return the entries from the newest snapshot on, and the values and states that they have together."""
    log = StreamLog(Storage(url))
    base, head = log.newest_snapshot(), log.head()
    assert base is not None
    assert head is not None
    entries = [base]
    while entries[-1].version < head.version:
        entry = log.read(entries[-1].version + 1)
        assert entry is not None
        entries.append(entry)
    held = _room(base)
    for entry in entries:
        _apply(log.storage, entry, held)
    return entries, held


def replay(url: str) -> Iterator[tuple[Manifest, _Model]]:
    """Yield each version of the log that is not a claim, and the values and states after it."""
    log = StreamLog(Storage(url))
    held: _Model = {}
    for version in log.versions():
        entry = log.read(version)
        if entry is not None and entry.kind != "claim":
            if entry.kind == "snapshot":
                held = _room(entry)
            _apply(log.storage, entry, held)
            yield entry, held


def _room(base: Manifest) -> _Model:
    """Return uninitialised values and states of the tables of a snapshot."""
    held: _Model = {}
    for fqn, spec in base.tables.items():
        states = base.states.get(fqn)
        widths = (
            ()
            if states is None
            else [spec.dim if each.width == "columns" else len(states.columns) for each in states.states]
        )
        held[fqn] = [torch.full((spec.num_rows, width), torch.nan) for width in (spec.dim, *widths)]
    return held


def _apply(storage: Storage, entry: Manifest, held: _Model) -> None:
    rows = [each for part in entry.parts for each in PartReader(storage, part, entry).with_states()]
    for each in sorted(rows, key=lambda each: each.ids is not None):
        _write(each, entry, held[each.block.table])


def _write(rows: BlockRows, entry: Manifest, held: list[Tensor]) -> None:
    block = rows.block
    ids = torch.arange(*block.rows) if rows.ids is None else rows.ids
    first, end = block.columns
    held[0][ids, first:end] = rows.read(0, block.num_rows)
    table = entry.states.get(block.table)
    assert len(rows.states) == (0 if table is None else len(table.states))
    for number, read in enumerate(rows.states):
        assert table is not None
        place = table.columns.index(block.columns)
        columns = (first, end) if table.states[number].width == "columns" else (place, place + 1)
        held[1 + number][ids, columns[0] : columns[1]] = read(0, block.num_rows)


def training_states(url: str, entry: Manifest) -> list[dict[str, Any]]:
    """Return the training state of each rank of a version."""
    found = []
    for stored in entry.training:
        tree = read_training(Storage(url), stored)
        found.append({name: tree.load(name) for name in tree.keys()})  # noqa: SIM118  not a mapping
    return found


def published(rank: int, world_size: int, root: str, optimizer: str) -> None:
    """Each version has the values and states at its cut, also of rows that change while a snapshot is copied."""
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url, optimizer=optimizer)
    publisher = trainer.publisher
    for _ in range(3):
        trainer.train()
        trainer.train()
        publisher.publish()
        dist.barrier()
        entries = trainer.check()
        assert entries[-1].format == 2
        assert len(entries[-1].training) == world_size
    source = publisher._reader
    assert source is not None
    before = source.copy

    def copy() -> list[BlockRows]:
        rows = before()
        (rows[-1 if rank else 0],) = [_during(rows[-1 if rank else 0], trainer.train)]
        return rows

    # The rows are trained after the values of a block were copied and before its states are copied.
    with mock.patch.object(source, "copy", copy), mock.patch.object(publisher._versions._delivery, "worker", _Now()):
        publisher.snapshot()
    dist.barrier()
    (entry,) = trainer.check()
    assert entry.kind == "snapshot"
    listed = [block for part in entry.parts for block in part.blocks if block.ids != "all" and block.num_rows]
    assert listed
    trainer.train()
    publisher.publish()
    dist.barrier()
    assert [each.kind for each in trainer.check()] == ["snapshot", "delta"]
    model = empty_model(trainer.tracker)
    Predictor(model, url).sync()
    for fqn, spec in trainer.tracker.shards.items():
        rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
        for (first, end), view in zip(spec.columns, trainer.tracker.live.column_views(fqn), strict=True):
            assert torch.equal(model[fqn][rows, first:end], view)
    trainer.close()


class _Now:
    """An executor that runs each task when it is submitted."""

    def submit(self, task: Callable[..., Any], *args: Any) -> Any:
        job: Future[Any] = Future()
        try:
            job.set_result(task(*args))
        except Exception as error:  # noqa: BLE001
            job.set_exception(error)
        return job


def _during(rows: BlockRows, train: Callable[[], None]) -> BlockRows:
    def read(begin: int, end: int) -> Tensor:
        stored = rows.read(begin, end)
        if end > begin:
            train()
        return stored

    return BlockRows(rows.block, rows.ids, read, rows.states)


def contents(rank: int, world_size: int, root: str) -> None:
    """The training state of each rank has its own objects, buffers and consumers."""
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url, consumers=["stream", "quick", "slow"], rank_state={"rank": _Held(rank)})
    tracker, publisher = trainer.tracker, trainer.publisher
    fqn = "ec.embedding_bags.row"
    versions = []
    for number in range(4):
        trainer.train()
        if number == 2:
            tracker.get_delta("quick")
            with tracker.reserve("slow") as slow:
                slow.make_pending(fqn, torch.tensor([0]))
        versions.append(publisher.publish().version)
    dist.barrier()
    entries = trainer.check()
    found = training_states(url, entries[-1])
    assert [each["rank"] for each in found] == [{"rank": {"rank": number}} for number in range(world_size)]
    assert found[0]["training"]["dense"]["param_groups"]
    assert found[0]["library"]["dense"]["dense.rank"].tolist() == [0]
    assert found[1]["library"]["buffers"]["dense.rank"].tolist() == [1]
    own = found[rank]["library"]
    assert own["batches"] == entries[-1].batches[1] == 4
    assert own["publisher"] == "stream"
    assert own["kernels"] == tracker.live.kernel_scalars()
    others = own["consumers"]
    assert others.keys() == {"quick", "slow"}
    # Rows of the versions after this one are pending, and those that were left out.
    assert others["quick"] == {"version": versions[1], "left_out": {}}
    assert others["slow"]["version"] is None
    assert {name: ids.tolist() for name, ids in others["slow"]["left_out"].items()} == {
        fqn: [tracker.shards[fqn].row_offset]
    }
    trainer.close()


class _Held:
    """An object with a state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]


def in_progress(rank: int, world_size: int, root: str) -> None:
    """A cut during an update waits, fails on all ranks, and loses no row; so does one with an object that raises."""
    url = f"file://{root}"
    held = _Held(rank)
    monitor = Monitor()
    trainer = Trainer(rank, world_size, url, rank_state={"rank": held}, monitor=monitor)
    figures, failures = Figures(monitor), {"publisher": "publisher", "reason": "UnfinishedStepError"}
    assert figures.of("publish_failures", **failures) == 0
    trainer.train()
    trainer.publisher.publish()
    trainer.train()
    output = trainer.model(batch(trainer.spec, trainer.generator))
    if rank:
        held.rank = object()  # type: ignore[assignment]
    failed = _raised(trainer.publisher.publish, seconds=0.01)
    assert isinstance(failed, UnfinishedStepError)
    assert figures.of("publish_failures", **failures) == 1
    failed = _raised(trainer.publisher.publish, seconds=0.01)
    assert isinstance(failed, UnfinishedStepError)
    expected = f" within {training._AGAIN_SECONDS:g} s"
    assert failed.reason.endswith(expected), "this thread holds the graph while it waits"
    del output
    gc.collect()
    failed = _raised(trainer.publisher.publish, seconds=0.01)
    assert isinstance(failed, InvalidArgumentError if rank else RankFailedError)
    assert "rank_state['rank']['rank']" in str(failed)
    held.rank = 0
    trainer.publisher.publish()
    dist.barrier()
    assert [each.kind for each in trainer.check()] == ["snapshot", "delta"]
    # States that are loaded are sent, too.
    optimizer = trainer.model.fused_optimizer
    for states in optimizer.state_dict()["state"].values():
        for state in states.values():
            for each in state.local_shards():
                each.tensor.fill_(0.5)
    # They are sent by the next version if this one fails before it has marked them.
    with mock.patch.object(ConsumerHandle, "make_pending", side_effect=MemoryError), pytest.raises(MemoryError):
        trainer.publisher.publish()
    trainer.publisher.publish()
    dist.barrier()
    trainer.check()
    # As after a reshard: only a snapshot may have other column ranges.
    source = trainer.publisher._reader
    assert source is not None
    tables = source.tables
    if rank:
        tables.published = tables.published._replace(states={})
    assert source.needs_snapshot == bool(rank)
    assert trainer.publisher.publish().kind == "snapshot"
    tables.published = tables.published._replace(states={})
    with mock.patch.object(type(source), "needs_snapshot", False):
        failed = _raised(trainer.publisher.publish, seconds=1)
    assert isinstance(failed, InvalidArgumentError)
    assert trainer.publisher.publish().kind == "snapshot"
    trainer.close()


def wrong_order(rank: int, world_size: int, root: str) -> None:
    """A cut after a backward pass that no step of the tracker has counted fails on all ranks, and loses no row."""
    trainer = Trainer(rank, world_size, f"file://{root}/unused")
    trainer.publisher.close()

    def update() -> None:
        trainer.model(batch(trainer.spec, trainer.generator)).backward()
        trainer.optimizer.step()

    update()  # a warm-up before the publisher is built
    trainer.url = f"file://{root}/stream"
    monitor = Monitor()
    trainer.publisher = trainer.publish_to(trainer.url, monitor=monitor, cadence=Cadence(batches=1))
    trainer.publisher.publish()
    trainer.train()
    update()
    for action in (trainer.publisher.publish, trainer.publisher.snapshot):
        with pytest.raises(UnfinishedStepError, match=r"after batch 1, .*order: backward\(\), opt.*step"):
            action()
    trainer.publisher.step()
    trainer.publisher.step()
    with pytest.raises(UnfinishedStepError, match="not those after batch"):
        trainer.publisher.flush()
    failures = Figures(monitor).of("publish_failures", publisher="publisher", reason="UnfinishedStepError")
    assert failures == 4
    update()  # two backward passes for one step, as in an accumulation
    trainer.tracker.step()
    with torch.no_grad():
        trainer.model(batch(trainer.spec, trainer.generator))
    update()
    trainer.tracker.reattach()
    with pytest.raises(UnfinishedStepError, match="not those after batch"):
        trainer.publisher.publish()
    trainer.tracker.step()
    trainer.publisher.publish()
    dist.barrier()
    assert [each.kind for each in trainer.check()] == ["snapshot", "delta"]
    trainer.close()


def _raised(action: Callable[[], object], *, seconds: float) -> DeltaTrackerError:
    with mock.patch.object(training, "_UPDATE_SECONDS", seconds), pytest.raises(DeltaTrackerError) as raised:
        action()
    return raised.value


def refused(rank: int, world_size: int, root: str) -> None:
    """What a version with states cannot have is refused when the publisher is built."""
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url)
    trainer.publisher.close()
    choices: list[tuple[dict[str, Any], str]] = [
        ({"top_k": TopK(rows=5, score=lambda _, rows: torch.ones(len(rows)))}, "top_k"),
        ({"encoding": Encoding.INT8}, "encoding"),
        ({"encoding": Encoding.F16}, "encoding"),
        ({"recovery": "optimizer"}, "recovery"),
        ({"recovery": Recovery()}, "replica"),
        ({"recovery": None} if rank else {}, "recovery=None where rank 0 has recovery=Recovery" if rank else ""),
    ]
    for kwargs, text in choices:
        with pytest.raises(DeltaTrackerError, match=text):
            trainer.publish_to(url, **kwargs)
    mark_incomplete(trainer.model, 3)
    with pytest.raises(IncompleteModelError):
        trainer.publish_to(url)
    mark_complete(trainer.model)
    trainer.tracker.detach()
    trainer.tracker = ModelDeltaTracker(trainer.model, fqns_to_skip=["first"])
    with pytest.raises(DeltaTrackerError, match="first"):
        trainer.publish_to(url)
    trainer.tracker.detach()


def resumed(rank: int, world_size: int, root: str) -> None:
    """A publisher continues a restored stream with a delta, and with a snapshot if the format is another than before.

    After a load of a checkpoint, it continues with a delta only without states, which the checkpoint may lack.
    """
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url)
    kinds = []
    for states, is_restored in (
        (True, False),
        (True, True),
        (True, False),
        (False, False),
        (False, False),
        (True, False),
    ):
        objects = {"dense": trainer.optimizer}
        trainer.train()
        state = trainer.tracker.state_dict()
        trainer.publisher.close()
        trainer.tracker.detach()
        trainer.tracker = ModelDeltaTracker(trainer.model)
        if is_restored:
            restore(trainer.model, url, tracker=trainer.tracker, recovery=Recovery(training_state=objects))
        else:
            trainer.tracker.load_state_dict(state)
        # No snapshot is due by the cadence, so each one is due to a load or a change of format.
        cadence = Cadence(batches=1, snapshot_every=100 if states else None)
        recovery = Recovery(training_state=objects) if states else None
        trainer.publisher = trainer.publish_to(url, recovery=recovery, cadence=cadence)
        trainer.train()
        trainer.publisher.step()
        trainer.publisher.step()
        trainer.publisher.flush()
        kinds.append(_last(url))
        if states:
            trainer.check()
    with_states = [("snapshot", 2), ("delta", 2), ("snapshot", 2)]
    assert kinds == [*with_states, ("snapshot", 1), ("delta", 1), ("snapshot", 2)], kinds
    trainer.close()


def _last(url: str) -> tuple[str, int]:
    head = StreamLog(Storage(url)).head()
    assert head is not None
    return head.kind, head.format


def merged(rank: int, world_size: int, root: str) -> None:
    """A merged entry has the newest values and states of each row, and the last training state."""
    url = f"file://{root}"
    trainer = Trainer(rank, world_size, url)
    for fold in (1e9, 1e-9):
        for _ in range(4):
            trainer.train()
            trainer.publisher.publish()
        dist.barrier()
        if rank == 0:
            storage = Storage(url)
            _, held = read_stream(url)
            entry = compact(storage, fold=fold)
            assert entry is not None
            assert entry.format == 2
            head = StreamLog(storage).head()
            assert head is not None
            assert (entry.training, entry.states, entry.event_time) == (head.training, head.states, head.event_time)
            assert entry.kind == ("delta" if fold > 1 else "snapshot")
            rows = [each for part in entry.parts for each in PartReader(storage, part, entry).with_states()]
            if entry.kind == "snapshot":
                (again,), now = read_stream(url)
                assert again == entry
                for fqn, tensors in held.items():
                    for before, after in zip(tensors, now[fqn], strict=True):
                        assert torch.equal(before, after), fqn
            for each in rows:
                block, states = each.block, entry.states.get(each.block.table)
                ids = torch.arange(*block.rows) if each.ids is None else each.ids
                first, end = block.columns
                assert torch.equal(each.read(0, block.num_rows), held[block.table][0][ids, first:end])
                for number, read in enumerate(each.states):
                    assert states is not None
                    place = states.columns.index((first, end))
                    expected = held[block.table][1 + number][ids, place : place + 1]
                    assert torch.equal(read(0, block.num_rows), expected)
        dist.barrier()
    trainer.close()


def restored(rank: int, world_size: int, root: str, optimizer: str) -> None:
    """A restored job continues bit for bit, and its first version has no rows and is a delta."""
    url, copy = f"file://{root}/stream", f"file://{root}/copy"
    trainer = Trainer(rank, world_size, url, optimizer=optimizer)
    for _ in range(3):
        trainer.train()
        trainer.publisher.publish()
    trainer.train()
    last = trainer.publisher.publish()
    trainer.publisher.close()
    again = Trainer(rank, world_size, copy, optimizer=optimizer)
    again.publisher.close()
    for _ in range(2):
        again.train()
    recovery = Recovery(training_state={"dense": again.optimizer})
    found = restore(again.model, url, tracker=again.tracker, recovery=recovery)
    assert found.version == last.version
    assert found.num_batches == again.tracker.num_batches == trainer.tracker.num_batches == 4
    again.generator.set_state(trainer.generator.get_state())
    again.url, again.publisher = url, again.publish_to(url)
    first = again.publisher.publish()
    assert (first.kind, first.format) == ("delta", 2)
    assert sum(block.num_rows for part in first.parts for block in part.blocks) == 0
    for _ in range(4):
        trainer.train()
        again.train()
        assert again.publisher.publish().kind == "delta"
        for fqn in trainer.tracker.tables:
            assert torch.equal(again.tracker.read_rows(fqn), trainer.tracker.read_rows(fqn)), fqn
            for own, other in zip(
                again.tracker.live.state_views(fqn), trainer.tracker.live.state_views(fqn), strict=True
            ):
                assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True)), fqn
        assert again.tracker.live.kernel_scalars() == trainer.tracker.live.kernel_scalars()
    dist.barrier()
    again.check()
    again.close()
    trainer.tracker.detach()
