"""Cases for restores of real sharded models; each runs on every rank.

One case trains, publishes and continues to train. Another one, possibly at another number of ranks under another plan,
restores a version and continues. Both write what they hold to files, which the test compares.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import DeltaTrackerError, StorageError
from delta_tracker.recovery import restore as restore_module
from delta_tracker.recovery.restore import restore
from delta_tracker.sharding.interrupted import check_complete
from delta_tracker.state_tree import pack
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, DenseSpec, Manifest
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage, open_storage
from delta_tracker.types import TableStates
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt

NUM_MORE = 4  # batches that are trained after a restore


def spec_of(tables: list[dict[str, Any]], **kwargs: Any) -> Spec:
    return Spec([Table(**table) for table in tables], bag=True, **kwargs)


class Loader:
    """Position in endless random batches; a rank's batches depend on its seed and the number of the batch."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec, self.seed, self.count = spec, seed, 0

    def next(self) -> Any:
        self.count += 1
        return batch(self.spec, torch.Generator().manual_seed(1000 * self.seed + self.count), size=6)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Trainer:
    """Model, optimizers, tracker and loader of one rank."""

    def __init__(self, spec: Spec, rank: int, *, learning_rate: float = 0.1, seed: int = 0) -> None:
        self.spec = spec
        self.model = shard(spec, learning_rate=learning_rate)
        self.tracker = ModelDeltaTracker(self.model, ["main", "other"])
        fused = self.tracker.fused_tables
        sharded = [fqn for fqn, each in self.tracker.shards.items() if fqn not in fused and not each.is_replicated]
        own, common = [], []
        for name, parameter in self.model.named_parameters():
            if name.removesuffix(".weight") not in fused:
                (own if name.removesuffix(".weight") in sharded else common).append(parameter)
        self.optimizer = torch.optim.Adam(common, lr=0.05)
        self.own = torch.optim.Adam(own, lr=0.05) if own else None
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.loader = Loader(spec, rank)
        if seed:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))

    @property
    def training_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def rank_state(self) -> dict[str, Any]:
        own = {} if self.own is None else {"own": self.own}
        return {"loader": self.loader, **own}

    def train(self, num_batches: int) -> list[float]:
        losses = []
        for _ in range(num_batches):
            self.optimizer.zero_grad()
            if self.own is not None:
                self.own.zero_grad()
            loss = self.model(self.loader.next())
            loss.backward()
            self.optimizer.step()
            if self.own is not None:
                self.own.step()
            self.scheduler.step()
            self.tracker.step()
            losses.append(float(loss))
        return losses

    def held(self) -> dict[str, Any]:
        """Return copies of all that this rank holds, tables by FQN."""
        scalars = self.tracker.kernel_scalars()
        tables = {}
        for fqn, spec in self.tracker.shards.items():
            tables[fqn] = {
                "rows": (spec.row_offset, spec.row_offset + spec.num_rows),
                "columns": spec.columns,
                "weights": [view.clone() for view in self.tracker.column_views(fqn)],
                "states": [[state.clone() for state in each] for each in self.tracker.state_views(fqn)],
                "scalars": scalars.get(fqn),
            }
        dense = {name: tensor.clone() for name, tensor in self.model.state_dict().items() if "dense" in name}
        states = {name: each.state_dict() for name, each in (*self.training_state.items(), *self.rank_state.items())}
        return {"tables": tables, "dense": dense, "states": states, "batches": self.tracker.num_batches}


class HandPublisher:
    """Writes versions of format 2 with the library's codec, but without its publisher."""

    def __init__(self, trainer: Trainer, rank: int, url: str) -> None:
        self.trainer, self.rank = trainer, rank
        self.storage = open_storage(url, create=True)
        self.claim = StreamLog(self.storage).claim() if rank == 0 else None

    def publish(self, kind: str) -> None:
        tracker = self.trainer.tracker
        rows = tracker.get_delta("main")
        listed = self.blocks({fqn: each.ids for fqn, each in rows.items()})
        blocks = listed if kind == "delta" else [*self.blocks(dict.fromkeys(rows)), *listed]
        dense = {"dense.weight": self.trainer.model.state_dict()["dense.weight"].clone()} if self.rank == 0 else {}
        head = self.shared(self.claim.head if self.claim is not None else None)
        names = [part_name(head.version + 1, head.generation, f"r{self.rank}{suffix}") for suffix in ("", "s", "t")]
        part = put_part(self.storage, names[0], blocks, dense, states_name=names[1])
        training = pack(self.training(), "state")
        stored = put_training(self.storage, names[2], [memoryview(training)], len(training))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (part, stored, self.trainer.tracker.table_states))
        if self.claim is not None:
            self.claim.commit(
                Manifest(
                    stream="",
                    generation=0,
                    writer="",
                    version=0,
                    kind=kind,
                    created=0.0,
                    batches=(0, tracker.num_batches),
                    tables=dict(tracker.tables),
                    dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in dense.items()},
                    parts=tuple(each[0] for each in every),
                    format=STATES_FORMAT,
                    states=self.states([each[2] for each in every]),
                    training=tuple(each[1] for each in every),
                    event_time=12.0,
                )
            )
        dist.barrier()

    def states(self, ranks: list[dict[str, TableStates]]) -> dict[str, TableStates]:
        found: dict[str, TableStates] = {}
        for fqn, states in itertools.chain.from_iterable(each.items() for each in ranks):
            columns = sorted({*(found[fqn].columns if fqn in found else ()), *states.columns})
            found[fqn] = replace(states, columns=tuple(columns))
        return found

    def shared(self, head: Any) -> Any:
        held = [head]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def blocks(self, ids: dict[str, Tensor | None]) -> list[BlockRows]:
        found = []
        tracker = self.trainer.tracker
        for fqn, places in ids.items():
            spec = tracker.shards[fqn]
            if not spec.num_rows or (spec.is_replicated and self.rank):
                continue
            states = tracker.state_views(fqn)
            for number, (columns, view) in enumerate(zip(spec.columns, tracker.column_views(fqn), strict=True)):
                every = torch.arange(spec.num_rows) if places is None else places
                rows = (spec.row_offset, spec.row_offset + spec.num_rows)
                form = "all" if places is None else "list"
                block = Block(fqn, rows, columns, len(every), form, Encoding.of(spec.table.dtype))
                listed = None if places is None else places + spec.row_offset
                values = BlockRows.of(block, listed, view[every].detach().clone())
                held = tuple(BlockRows.of(block, listed, each[every].clone()).read for each in states[number])
                found.append(replace(values, states=held))
        return found

    def training(self) -> dict[str, Any]:
        trainer, tracker = self.trainer, self.trainer.tracker
        unfused = {fqn: spec for fqn, spec in tracker.shards.items() if fqn not in tracker.fused_tables}
        state = trainer.model.state_dict()
        return {
            "library": {
                "kernels": tracker.kernel_scalars(),
                "dense": {"dense.bias": state["dense.bias"].clone()} if self.rank == 0 else {},
                "shards": {
                    fqn: {
                        "rows": [spec.row_offset, spec.row_offset + spec.num_rows],
                        "columns": [list(each) for each in spec.columns],
                        "replicated": spec.is_replicated,
                    }
                    for fqn, spec in unfused.items()
                },
                "publisher": "main",
                "consumers": {},
                "batches": tracker.num_batches,
            },
            "training": {name: each.state_dict() for name, each in trainer.training_state.items()}
            if self.rank == 0
            else {},
            "rank": {name: each.state_dict() for name, each in trainer.rank_state.items()},
            "data": None,
        }


def published(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """Train and publish a snapshot and two deltas; save the state at the last one, and the state after more batches."""
    trainer = Trainer(spec_of(**spec), rank)
    publisher = HandPublisher(trainer, rank, f"file://{path}/stream")
    trainer.train(3)
    publisher.publish("snapshot")
    for _ in range(2):
        trainer.train(2)
        publisher.publish("delta")
    torch.save(trainer.held(), Path(path) / f"saved-{rank}of{world_size}.pt")
    losses = trainer.train(NUM_MORE)
    torch.save({**trainer.held(), "losses": losses}, Path(path) / f"continued-{rank}of{world_size}.pt")


def warm(spec: Spec, rank: int, **kwargs: Any) -> Trainer:
    """Return a trainer with other weights and settings that has trained two batches."""
    trainer = Trainer(spec, rank, learning_rate=0.3, seed=rank + 5, **kwargs)
    trainer.train(2)
    return trainer


def restored(
    rank: int,
    world_size: int,
    path: str,
    spec: dict[str, Any],
    ignore: list[str],
    version: int | None = None,
    num_batches: int = NUM_MORE,
) -> dict[str, Any]:
    """Restore, and save the state before and after more batches."""
    trainer = warm(spec_of(**spec), rank)
    reads = _Reads()
    with reads:
        found = restore(
            trainer.model,
            f"file://{path}/stream",
            version,
            tracker=trainer.tracker,
            training_state=trainer.training_state,
            rank_state=trainer.rank_state,
            ignore=ignore,
        )
    check_complete(trainer.model)
    torch.save(trainer.held(), Path(path) / f"restored-{rank}of{world_size}.pt")
    pending = {name: trainer.tracker.num_pending(name) for name in ("main", "other")}
    losses = trainer.train(num_batches)
    torch.save({**trainer.held(), "losses": losses}, Path(path) / f"resumed-{rank}of{world_size}.pt")
    return {**asdict(found), "pending": pending, "notes": dict(trainer.tracker.annotations), "read": reads.num_bytes}


class _Reads:
    """Counts the bytes of the ranges that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __enter__(self) -> None:
        original = Storage.read_range

        def counting(storage: Storage, name: str, begin: int, end: int) -> Any:
            self.num_bytes += end - begin
            return original(storage, name, begin, end)

        self._patch = mock.patch.object(Storage, "read_range", counting)
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def interrupted(rank: int, world_size: int, path: str, spec: dict[str, Any], where: str) -> list[str]:
    """A restore that fails on rank 0 while it writes leaves a model that says so, until a restore completes."""
    trainer = warm(spec_of(**spec), rank)
    call = partial(
        restore,
        trainer.model,
        f"file://{path}/stream",
        tracker=trainer.tracker,
        training_state=trainer.training_state,
        rank_state=trainer.rank_state,
        timeout=timedelta(seconds=15),
    )
    before = trainer.held()
    fault = StorageError("file:///gone", "the disk is gone")
    kind, name = {
        "fit": (restore_module, "check_scalars"),
        "write": (restore_module, "write_scalars"),
        "load": (trainer.scheduler, "load_state_dict"),
    }[where]
    with mock.patch.object(kind, name, side_effect=fault) if rank == 0 else mock.MagicMock():
        messages = [attempt(call)]
    if where == "fit":
        assert same(trainer.held(), before)
    messages.append(attempt(lambda: check_complete(trainer.model)))
    messages.append(attempt(lambda: trainer.model(trainer.loader.next())))
    call()
    check_complete(trainer.model)
    trainer.train(1)
    return messages


def same(left: Any, right: Any) -> bool:
    """Return whether two nested values are equal bit for bit, except for the positions of loaders."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left if key != "loader")
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def refused(rank: int, world_size: int, path: str, specs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Restores that do not fit change nothing."""
    messages = {}
    url = f"file://{path}/stream"
    for what, spec in specs.items():
        trainer = warm(spec_of(**spec), rank)
        before = trainer.held()
        arguments: dict[str, Any] = {
            "tracker": trainer.tracker,
            "training_state": trainer.training_state,
            "rank_state": trainer.rank_state,
        }
        if what == "no optimizer":
            del arguments["training_state"]["optimizer"], arguments["rank_state"]
            arguments["training_state"] = {}
        if what == "version":
            arguments["version"] = 99 if rank == 0 else None
        if what == "reserved":
            handle = trainer.tracker.reserve("other", holder="a test")
        try:
            restore(trainer.model, url, **arguments)
            messages[what] = "restored"
        except DeltaTrackerError as error:
            messages[what] = f"{type(error).__name__}: {error}"
        if what == "reserved":
            handle.release()
        check_complete(trainer.model)
        assert same(trainer.held(), before), what
        trainer.train(1)
    trainer = Trainer(spec_of(**spec), rank)
    messages["cold"] = attempt(partial(restore, trainer.model, url, tracker=trainer.tracker))
    return messages
