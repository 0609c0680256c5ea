"""Cases for restores of real sharded models; each runs on every rank.

One case trains, publishes and continues to train. Another one, possibly at another number of ranks under another plan,
restores a version and continues. Both write what they hold to files, which the test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import DataPosition, ModelDeltaTracker, Publisher, Recovery
from delta_tracker.errors import StorageError
from delta_tracker.recovery import job, recovery_plan
from delta_tracker.recovery.random_states import RandomStates
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.recovery.restore import restore
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.sharding.interrupted import check_complete
from delta_tracker.stream.format import digests
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests import models
from tests.models import Model, Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt
from tests.sharding.replicated import replicate
from tests.tracker.checkpointing_cases import notes_of

NUM_MORE = 4  # batches that are trained after a restore


def spec_of(tables: list[dict[str, Any]], **kwargs: Any) -> Spec:
    return Spec([Table(**table) for table in tables], bag=True, **kwargs)


class Counting(Model):
    """A model with a buffer that differs between the ranks."""

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__(spec, device)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        self.seen += features.values().sum()
        return super().forward(features)


class Loader:
    """Endless random batches; a rank's batches depend on its seed and the number of the batch."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec, self.seed, self.count = spec, seed, 0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            self.count += 1
            yield batch(self.spec, torch.Generator().manual_seed(1000 * self.seed + self.count), size=6)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class ReshardingLoader(Loader):
    """Loader that continues at another number of ranks."""

    def load_rank_states(self, states: Sequence[dict[str, int]]) -> None:
        self.count = sum(state["count"] for state in states)


class Trainer:
    """Model, optimizers, tracker and loader of one rank."""

    def __init__(self, spec: Spec, rank: int, *, learning_rate: float = 0.1, seed: int = 0, **options: Any):
        self.spec = spec
        with mock.patch.object(models, "Model", Counting):
            self.model = shard(spec, learning_rate=learning_rate)
        self.tracker = ModelDeltaTracker(self.model, ["main", "other"])
        fused = self.tracker.live.fused_tables
        sharded = [fqn for fqn, each in self.tracker.shards.items() if fqn not in fused and not each.is_replicated]
        own, common = [], []
        for name, parameter in self.model.named_parameters():
            if name.removesuffix(".weight") not in fused:
                (own if name.removesuffix(".weight") in sharded else common).append(parameter)
        if options.get("reverses"):  # also the fused tables of this rank, which the optimizer does not step
            fused_weights = [
                each for name, each in self.model.named_parameters() if name.removesuffix(".weight") in fused
            ]
            common = [*fused_weights, *common[::-1]]
        self.optimizer = torch.optim.Adam(common, lr=0.05)
        self.own = torch.optim.Adam(own, lr=0.05) if own else None
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.loader = (ReshardingLoader if options.get("reshards") else Loader)(spec, rank)
        self.data = DataPosition(self.loader, event_time=lambda features: 10.0 + rank)
        self.tracker.attach_data(self.data)
        if seed:
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(torch.randn(parameter.shape))

    @property
    def training_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    @property
    def rank_state(self) -> dict[str, Any]:
        own = {} if self.own is None else {"own": self.own}
        return {"random": RandomStates(), **own}

    @property
    def recovery(self) -> Recovery:
        return Recovery(training_state=self.training_state, rank_state=self.rank_state)

    def losses(self) -> Iterator[Tensor]:
        """Yield the loss of each batch, before its backward pass."""
        for features in self.data:
            self.optimizer.zero_grad()
            if self.own is not None:
                self.own.zero_grad()
            yield self.model(features) * torch.rand(())

    def train(self, num_batches: int) -> list[float]:
        losses = []
        for _, loss in zip(range(num_batches), self.losses(), strict=False):
            loss.backward()
            self.optimizer.step()
            if self.own is not None:
                self.own.step()
            self.scheduler.step()
            self.tracker.step()
            losses.append(float(loss))
        return losses

    def publisher(self, path: str, **options: Any) -> Publisher:
        return Publisher(
            self.tracker,
            f"file://{path}/stream",
            "main",
            dense=["dense.weight"],
            recovery=self.recovery,
            **options,
        )

    def restore(self, path: str, version: int | None = None, **kwargs: Any) -> Any:
        arguments = {"tracker": self.tracker, "recovery": self.recovery, "data": self.data, **kwargs}
        return restore(self.model, f"file://{path}/stream", version, **arguments)

    def held(self) -> dict[str, Any]:
        """Return copies of all that this rank holds, tables by FQN."""
        scalars = self.tracker.live.kernel_scalars()
        tables = {}
        for fqn, spec in self.tracker.shards.items():
            numbers = scalars.get(fqn)
            tables[fqn] = {
                "rows": (spec.row_offset, spec.row_offset + spec.num_rows),
                "columns": spec.columns,
                "weights": [view.clone() for view in self.tracker.live.column_views(fqn)],
                "states": [[state.clone() for state in each] for each in self.tracker.live.state_views(fqn)],
                "scalars": None if numbers is None else {name: float(each) for name, each in numbers.items()},
            }
        dense = {
            name: tensor.clone()
            for name, tensor in self.model.state_dict().items()
            if name.startswith(("dense", "seen"))
        }
        states = {name: each.state_dict() for name, each in (*self.training_state.items(), *self.rank_state.items())}
        states["data"] = self.data.state_dict()
        moments = {
            name.removesuffix(".weight"): {key: value.clone() for key, value in self.optimizer.state[parameter].items()}
            for name, parameter in self.model.named_parameters()
            if parameter in self.optimizer.state
        }
        return {
            "moments": moments,
            "tables": tables,
            "dense": dense,
            "states": states,
            "batches": self.tracker.num_batches,
        }


def published(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """Train and publish a snapshot and two deltas; save the state at the last one, and the state after more batches."""
    trainer = Trainer(spec_of(**spec), rank)
    publisher = trainer.publisher(path)
    trainer.train(3)
    publisher.snapshot()
    for _ in range(2):
        trainer.train(2)
        publisher.publish()
    torch.save(trainer.held(), Path(path) / f"saved-{rank}of{world_size}.pt")
    publisher.close()
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
    reshards: bool = False,
) -> dict[str, Any]:
    """Restore, and save the state before and after more batches."""
    trainer = warm(spec_of(**spec), rank, reshards=reshards)
    found = trainer.restore(path, version, ignore=ignore)
    check_complete(trainer.model)
    assert [name for name, parameter in trainer.model.named_parameters() if parameter.grad is not None] == []
    torch.save(trainer.held(), Path(path) / f"restored-{rank}of{world_size}.pt")
    pending = {name: trainer.tracker.num_pending(name) for name in ("main", "other")}
    losses = trainer.train(num_batches)
    torch.save({**trainer.held(), "losses": losses}, Path(path) / f"resumed-{rank}of{world_size}.pt")
    unloaded = {name: states if name == "data" else len(states) for name, states in found.rank_states.items()}
    return {
        **asdict(replace(found, rank_states=unloaded)),
        "pending": pending,
        "notes": notes_of(trainer.tracker),
    }


def continued(rank: int, world_size: int, path: str, spec: dict[str, Any], version: int | None) -> list[Any]:
    """After a restore, a new publisher continues with deltas, from which another job restores the trainer's state.

    It also restores this state from what a compaction has merged.
    """
    trainer = warm(spec_of(**spec), rank)
    trainer.restore(path, version)
    publisher = trainer.publisher(path)
    versions = [publisher.publish()]
    trainer.train(1)
    versions.append(publisher.publish())
    publisher.close()
    other = warm(spec_of(**spec), rank)
    found = other.restore(path)
    assert same(other.held(), trainer.held())
    assert found.version == versions[-1].version
    storage = Storage(f"file://{path}/stream")
    if rank == 0:
        compact(storage)
        assert any(each.merges for each in recovery_path(StreamLog(storage)))
    dist.barrier()
    merged = warm(spec_of(**spec), rank)
    merged.restore(path)
    assert same(merged.held(), trainer.held())
    return [*([each.kind, each.num_rows] for each in versions), found.num_batches]


def consumers(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> None:
    """The rows that are pending for another consumer are those of the versions that it has not read."""
    trainer = Trainer(spec_of(**spec), rank)
    publisher = trainer.publisher(path)
    trainer.train(2)
    publisher.snapshot()  # version 1
    for version in range(2, 8):
        trainer.train(1)
        if version == 4:
            trainer.tracker.get_delta("other")
        publisher.publish()
    pending = {fqn: set(rows.ids.tolist()) for fqn, rows in trainer.tracker.get_delta("other", commit=False).items()}
    publisher.close()
    log = StreamLog(Storage(f"file://{path}/stream"))
    resumed = warm(spec_of(**spec), rank)
    resumed.restore(path)
    later = {version: _rows(log, version, resumed.tracker) for version in range(2, 8)}
    found = {fqn: set(rows.ids.tolist()) for fqn, rows in resumed.tracker.get_delta("other").items()}
    for fqn, ids in found.items():
        known = set().union(*(later[version].get(fqn, set()) for version in range(4, 8)))
        assert pending[fqn] <= ids, fqn
        assert known <= ids <= known | later[3].get(fqn, set()) | later[4].get(fqn, set()), fqn
    assert any(found.values())
    assert not any(map(len, resumed.tracker.get_delta("main").values()))
    older = warm(spec_of(**spec), rank)
    older.restore(path, 3)  # the consumer had read no version
    read = older.tracker.get_delta("other")
    assert all(len(rows) == older.tracker.shards[fqn].num_rows for fqn, rows in read.items())


def _rows(log: StreamLog, version: int, tracker: ModelDeltaTracker) -> dict[str, set[int]]:
    """Return the local ids of this rank's rows in a delta."""
    entry = log.read(version)
    assert entry is not None
    found: dict[str, set[int]] = {}
    for reader in read_parts(log.storage, entry):
        for rows in reader.rows:
            spec = tracker.shards[rows.block.table]
            assert rows.ids is not None
            local = {row - spec.row_offset for row in rows.ids.tolist()}
            found.setdefault(rows.block.table, set()).update(local & set(range(spec.num_rows)))
    return found


def shared_reads(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> dict[str, int]:
    """Publish a version with small pieces on all ranks, and restore it on the same ranks; return the bytes read."""
    with mock.patch.object(digests, "PIECE_BYTES", 1024):
        trainer = warm(spec_of(**spec), rank)
        publisher = trainer.publisher(path)
        entry = publisher.snapshot()
        publisher.close()
        found = {"all": 0, "read": 0}
        original = Storage.read_range
        rows = {each.name: each for part in entry.parts for each in (part, part.states) if each is not None}

        def counting(storage: Storage, name: str, begin: int, end: int, **options: Any) -> Any:
            found["read"] += end - begin if name in rows else 0
            return original(storage, name, begin, end, **options)

        with mock.patch.object(Storage, "read_range", counting):
            trainer.restore(path)
        found["all"] = sum(each.num_bytes for each in rows.values())
        found["objects"] = len(rows)
    return found


def interrupted(rank: int, world_size: int, path: str, spec: dict[str, Any], where: str) -> list[str]:
    """A restore that fails on rank 0 while it writes leaves a model that says so, until a restore completes."""
    trainer = warm(spec_of(**spec), rank)
    call = partial(trainer.restore, path, timeout=timedelta(seconds=60))
    before = trainer.held()
    fault = StorageError("file:///gone", "the disk is gone")
    kind, name = {
        "fit": (recovery_plan, "check_scalars"),
        "write": (recovery_plan, "write_scalars"),
        "load": (type(trainer.scheduler), "load_state_dict"),
    }[where]
    with mock.patch.object(kind, name, side_effect=fault) if rank == 0 else mock.MagicMock():
        messages = [attempt(call)]
    if where == "fit":
        assert same(trainer.held(), before)
    messages.append(attempt(lambda: check_complete(trainer.model)))
    messages.append(attempt(lambda: trainer.train(1)))
    call()
    check_complete(trainer.model)
    trainer.train(1)
    return messages


def interrupted_by_the_user(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> list[str]:
    """Ctrl-C on rank 0 while it writes ends the restore on the other ranks, too. All ranks may restore again."""
    trainer = warm(spec_of(**spec), rank)
    # A group that waits for its timeout makes the ranks of the test fail.
    call = partial(trainer.restore, path, timeout=timedelta(seconds=120))
    messages = []
    interrupt = mock.patch.object(recovery_plan, "write_scalars", side_effect=KeyboardInterrupt)
    with interrupt if rank == 0 else mock.MagicMock():
        try:
            messages.append(attempt(call))
        except KeyboardInterrupt:
            messages.append("interrupted")
    messages.append(attempt(lambda: check_complete(trainer.model)))
    call()
    check_complete(trainer.model)
    return messages


def same(left: Any, right: Any) -> bool:
    """Return whether two nested values are equal bit for bit."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def refused(rank: int, world_size: int, path: str, specs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Restores that do not fit change nothing."""
    messages: dict[str, str] = {}
    built: dict[str, Any] = {}
    for what, spec in specs.items():
        if spec != built:
            trainer, built = warm(spec_of(**spec), rank), spec
        arguments: dict[str, Any] = {}
        loss = next(trainer.losses()) if what == "update" else None
        before = trainer.held()
        if what == "no optimizer":
            arguments["recovery"] = Recovery(rank_state=trainer.rank_state)
        if what == "version":
            arguments["version"] = 99 if rank == 0 else None
        if what == "ignore" and rank == 0:
            arguments["ignore"] = ["random"]
        if what == "reserved":
            handle = trainer.tracker.reserve("other", holder="a test")
        with mock.patch.object(job, "_UPDATE_SECONDS", 0.01), _damaged(what):
            messages[what] = attempt(partial(trainer.restore, path, **arguments))
        if what == "reserved":
            handle.release()
        check_complete(trainer.model)
        assert same(trainer.held(), before), what
        if loss is not None:
            loss.backward()
            trainer.tracker.step()
        trainer.train(1)
    trainer = Trainer(spec_of(**spec), rank)
    messages["cold"] = attempt(partial(trainer.restore, path))
    replicas = replicate(Spec([Table("row", 17, "row")], bag=True), world_size)
    messages["replicas"] = attempt(lambda: restore(replicas, f"file://{path}/stream"))
    return messages


def misuse(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> dict[str, str]:
    """Restores with wrong objects change nothing. A position that was not attached is attached."""
    trainer = warm(spec_of(**spec), rank)
    trainer.tracker.detach()
    trainer.tracker = ModelDeltaTracker(trainer.model, ["main", "other"])
    trainer.data = DataPosition(trainer.loader)
    optimizer, scheduler = trainer.optimizer, trainer.scheduler
    other = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    before = trainer.held()
    wrong = replace(trainer.recovery, training_state={"optimizer": other, "scheduler": scheduler})
    swapped = replace(trainer.recovery, training_state={"optimizer": scheduler, "scheduler": optimizer})
    messages = {
        "optimizer": attempt(lambda: trainer.restore(path, recovery=wrong)),
        "swapped": attempt(lambda: trainer.restore(path, recovery=swapped)),
        "empty": attempt(lambda: restore(trainer.model, f"file://{path}/empty", tracker=trainer.tracker)),
    }
    publisher = Publisher(trainer.tracker, f"file://{path}/other", "main")
    messages["publisher"] = attempt(lambda: trainer.restore(path))
    publisher.close()
    check_complete(trainer.model)
    assert same(trainer.held(), before)
    found = trainer.restore(path)
    assert "rank_states" not in repr(found)
    assert trainer.tracker.progress.data_position is trainer.data
    trainer.tracker.attach_data(trainer.data)
    another = DataPosition(Loader(trainer.spec, rank))
    messages["data"] = attempt(lambda: trainer.restore(path, data=another))
    trainer.train(1)
    assert trainer.data.num_batches == found.num_batches + 1
    return messages


def _damaged(what: str) -> AbstractContextManager[object]:
    """Return a context in which the positions of the consumers miss a field, if ``what`` is "library"."""
    original = TrainingStates.load

    def load(states: TrainingStates, rank: int, *keys: str) -> Any:
        if keys == ("library", "consumers"):
            return {"other": {"left_out": {}}}
        return original(states, rank, *keys)

    return mock.patch.object(TrainingStates, "load", load) if what == "library" else nullcontext()
