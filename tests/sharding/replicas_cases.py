"""Cases for 2D parallelism: trackers and publishers of a DMPCollection on all ranks."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec.distributed.types import ShardingEnv

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.sharding import replicas
from delta_tracker.sharding.replicas import ReplicaGroup
from tests.models import Spec, Table, batch, shard
from tests.sharding.replicated import replicate

_INTEGERS = {2: torch.int16, 4: torch.int32}


def bits_of(tracker: ModelDeltaTracker) -> dict[str, Tensor]:
    """Return a copy of this rank's rows ``[R, D]`` by FQN, as integers."""
    return {fqn: rows.view(_INTEGERS[rows.element_size()]) for fqn, rows in tracker.read_tables().items()}


def changed(before: Tensor, now: Tensor) -> list[int]:
    """Return the ids of the rows whose bits differ."""
    return (before != now).any(dim=1).nonzero().flatten().tolist() if now.numel() else []


def attempt(action: Any) -> str:
    """Return the error of an action."""
    try:
        action()
    except DeltaTrackerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _train(model: nn.Module, spec: Spec, generator: torch.Generator, tracker: ModelDeltaTracker) -> None:
    model(batch(spec, generator, size=2)).backward()
    tracker.step()


def _shrink(model: nn.Module, tracker: ModelDeltaTracker) -> None:
    """Scale the rows so that many values are close to the smallest ones of float16."""
    for fqn in tracker.tables:
        for view in tracker.live.column_views(fqn):
            view.data.mul_(1e-3)
            tracker.mark_changed(fqn)


def reported(
    rank: int, world_size: int, num_replicas: int, mode: str, seeds: list[int], dtype: str = "FP32", bag: bool = False
) -> list[dict[str, int]]:
    """After random steps and syncs, each read has the rows whose bits changed, with their old values."""
    return [_reported(rank, world_size, num_replicas, mode, seed, dtype=dtype, bag=bag) for seed in seeds]


def _reported(
    rank: int, world_size: int, num_replicas: int, mode: str, seed: int, *, dtype: str, bag: bool
) -> dict[str, int]:
    spec = Spec.every_sharding(world_size // num_replicas, dtype=dtype, bag=bag)
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    counts = dict.fromkeys(["trained", "synced", "unstable"], 0)
    model = replicate(spec, num_replicas)
    # Other gradients on each rank, because the average of rows that change equally has the same bits.
    nn.init.normal_(model.module.dense.weight, generator=torch.Generator().manual_seed(rank))
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        if dtype == "FP16":
            _shrink(model, tracker)
        copies, old = bits_of(tracker), tracker.read_tables()
        tracker.clear()
        expected: dict[str, set[int]] = {fqn: set() for fqn in copies}
        for event in ["sync", *draw.choices(["train", "train", "eval", "sync", "read"], k=12), "sync", "sync", "read"]:
            if event == "train":
                _train(model, spec, generator, tracker)
            elif event == "eval":
                with torch.no_grad():
                    model(batch(spec, generator))
            elif event == "sync":
                model.sync()
                counts["unstable"] += sum(map(len, tracker._hooks.registered[-1]._unstable.values()))
            now = bits_of(tracker)
            for fqn, before in copies.items():
                ids = changed(before, now[fqn])
                counts["trained" if event == "train" else "synced"] += len(ids)
                expected[fqn] |= set(ids)
            copies = now
            if event == "read":
                for fqn, rows in tracker.get_delta().items():
                    assert rows.ids.tolist() == sorted(expected[fqn]), (seed, fqn)
                    if mode == "embedding" and len(rows):
                        assert rows.known.all()
                        assert torch.equal(rows.states, old[fqn][rows.ids]), (seed, fqn)
                expected, old = {fqn: set() for fqn in copies}, tracker.read_tables()
        assert tracker.num_hook_errors == 0
    return counts


def follow(
    rank: int,
    world_size: int,
    url: str,
    num_replicas: int,
    seed: int = 0,
    local: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A predictor equals every replica after each sync, and the first replica between syncs; rows are sent once."""
    spec = Spec.every_sharding(world_size // num_replicas)
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(rank)
    model = replicate(spec, num_replicas, **(local or {}))
    versions = []
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        publisher = Publisher(tracker, url)
        held = {fqn: torch.full((table.num_rows, table.dim), -1.0) for fqn, table in tracker.tables.items()}
        predictor = Predictor(held, url)
        for number in range(7):
            for _ in range(draw.randint(0, 2)):
                _train(model, spec, generator, tracker)
            is_synced = number > 0 and draw.random() < 0.7
            if is_synced:
                model.sync()
            manifest = publisher.snapshot() if number == 4 else publisher.publish()
            assert predictor.sync() == manifest.version
            for fqn, place in tracker.shards.items():
                rows = slice(place.row_offset, place.row_offset + place.num_rows)
                for (first, end), view in zip(place.columns, tracker.live.column_views(fqn), strict=True):
                    if is_synced or place.replica == 0:
                        assert torch.equal(held[fqn][rows, first:end], view), (number, fqn)
            blocks = [(block.table, block.rows, block.columns) for part in manifest.parts for block in part.blocks]
            if manifest.kind == "delta":
                assert len(set(blocks)) == len(blocks), "a block is written twice"
            versions.append([manifest.kind, manifest.num_rows])
        dist.barrier()
        publisher.close()
        assert tracker.num_hook_errors == 0
    return {"versions": versions}


def top_k(rank: int, world_size: int, num_replicas: int) -> dict[str, Any]:
    """Top-k counts each row once: its budget is spent on the rows of the first replica."""
    spec = Spec([Table("t", 40, "row")])
    model = replicate(spec, num_replicas)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        model.sync()
        tracker.clear()
        _train(model, spec, torch.Generator().manual_seed(rank), tracker)
        model.sync()
        num_changed = sum(tracker.num_pending().values())
        delta = tracker.get_delta(top_k=TopK(rows=3))
        return {
            "replica": tracker.shards["ec.embeddings.t"].replica,
            "changed": num_changed,
            "sent": delta.num_rows,
            "left": delta.pending_rows,
        }


def saved(rank: int, world_size: int) -> dict[str, Any]:
    """A state is saved only directly after a sync; it is loaded with replicas and without."""
    spec = Spec.every_sharding(1)
    model = replicate(spec, world_size)
    generator = torch.Generator().manual_seed(rank)
    said = []
    with ModelDeltaTracker(model) as tracker:
        said.append(attempt(tracker.state_dict))
        model.sync()
        tracker.get_delta()
        _train(model, spec, generator, tracker)
        said.append(attempt(tracker.state_dict))
        said.append(attempt(lambda: tracker.state_dict(strategy="gather")))
        model.sync()
        said.append(attempt(tracker.state_dict))
        state = tracker.state_dict()
        gathered = tracker.state_dict(strategy="gather")
        pending = tracker.get_delta_ids()
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, gathered)
        whole = every[0]
    with ModelDeltaTracker(model) as tracker:
        for part in (state, whole):
            tracker.load_state_dict(part)
            assert {fqn: ids.tolist() for fqn, ids in tracker.get_delta_ids().items()} == {
                fqn: ids.tolist() for fqn, ids in pending.items()
            }
        model.sync()
        assert all(len(rows) == tracker.shards[fqn].num_rows for fqn, rows in tracker.get_delta().items()), (
            "the replicas may have loaded different rows"
        )
    # All ranks share the rows of the first replica.
    pending_of: list[Any] = [None] * world_size
    dist.all_gather_object(pending_of, {fqn: ids.tolist() for fqn, ids in pending.items()})
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size))) as tracker:
        tracker.load_state_dict(whole)
        for fqn, rows in tracker.get_delta().items():
            place = tracker.shards[fqn]
            mine = range(place.row_offset, place.row_offset + place.num_rows)
            assert rows.global_ids.tolist() == [row for row in pending_of[0][fqn] if row in mine], fqn
    return {"said": said, "num_pending": sum(map(len, pending.values()))}


def exceeded(rank: int, world_size: int) -> dict[str, Any]:
    """If the log exceeds ``max_bytes``, consumers are dropped first, then the next sync marks all rows."""
    spec = Spec([Table("t", 4000, "row")])
    model = replicate(spec, world_size)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, max_bytes=2_000_000) as tracker:
        model.sync()
        tracker.get_delta()
        model.sync()
        before = tracker.memory().log_bytes
        tracker._log.consumers._max_bytes = 100
        _train(model, spec, torch.Generator().manual_seed(rank), tracker)
        needs = tracker.needs_snapshot()
        tracker.clear()
        tracker._log.consumers._max_bytes = None
        model.sync()
        return {"before": before, "needs": needs, "rows": tracker.get_delta().num_rows}


def attached(rank: int, world_size: int) -> dict[str, Any]:
    """Trackers are detached in any order; the last one restores ``sync``."""
    spec = Spec([Table("t", 20, "row")])
    model = replicate(spec, world_size)
    generator = torch.Generator().manual_seed(rank)
    original = model.sync
    first, second = ModelDeltaTracker(model), ModelDeltaTracker(model)
    rows = []
    model.sync()
    for tracker in (first, second):
        tracker.clear()
    _train(model, spec, generator, first)
    model.sync()
    rows.append([tracker.get_delta().num_rows for tracker in (first, second)])
    first.detach()
    _train(model, spec, generator, second)
    model.sync()
    rows.append(second.get_delta().num_rows)
    first.reattach()
    model.sync()
    rows.append([tracker.get_delta().num_rows for tracker in (first, second)])
    with second:
        model.sync()
    first.detach()
    return {"rows": rows, "restored": "sync" not in model.__dict__ and model.sync == original}


def whole(rank: int, world_size: int, cause: str, mode: str) -> dict[str, Any]:
    """All rows count as changed if the average of equal rows may differ from the rows, or if the replicas may."""
    spec = Spec([Table("t", 20, "row")])

    def add_up(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    kwargs = {"custom_all_reduce": add_up} if cause == "function" else {}
    model = replicate(spec, world_size, **kwargs)
    num_exchanging = () if cause == "number" else replicas._EXCHANGING
    with (
        mock.patch.object(replicas, "_EXCHANGING", num_exchanging),
        ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker,
    ):
        model.sync(include_optimizer_state=cause != "states")
        tracker.clear()
        old = tracker.read_tables()
        if cause == "error" and rank == 0:
            with mock.patch.object(ReplicaGroup, "pack", side_effect=MemoryError("no memory")):
                model.sync()
        elif cause == "load" and rank == 1:
            tracker.mark_changed("ec.embeddings.t")
            tracker.clear()
            model.sync()
        else:
            model.sync()
        (rows,) = tracker.get_delta().values()
        is_old = rows.states is not None and bool(rows.known.all()) and torch.equal(rows.states, *old.values())
        return {"rows": len(rows), "errors": tracker.num_hook_errors, "is_old": is_old}


def refused(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors for models whose writes at a sync cannot be reported."""
    spec = Spec([Table("t", 20, "row"), Table("u", 20, "row")])
    said = {}
    model = replicate(spec, world_size)
    inner = model.module.module if hasattr(model.module, "module") else model.module
    said["no wrapper"] = attempt(lambda: ModelDeltaTracker(inner))
    inner.ec._env.sharding_strategy = mock.Mock()
    inner.ec._env.sharding_strategy.name = "FULLY_SHARDED"
    said["fully sharded"] = attempt(lambda: ModelDeltaTracker(model))
    said["skipped"] = attempt(lambda: ModelDeltaTracker(model, fqns_to_skip=["ec"]))
    del inner.ec._env.sharding_strategy
    remap = nn.Module()
    remap._embedding_module = inner.ec
    inner.remap = remap
    said["collisions"] = attempt(lambda: ModelDeltaTracker(model))
    del inner.remap
    said["accepted"] = attempt(lambda: ModelDeltaTracker(model).detach())
    env, inner.ec._env = inner.ec._env, mock.Mock(spec=ShardingEnv)
    said["sharded before"] = attempt(lambda: ModelDeltaTracker(model))
    inner.ec._env = env
    cached = replicate(Spec([Table("t", 20, "row", kernel="fused_uvm_caching"), Table("u", 20, "row")]), world_size)
    said["cached"] = attempt(lambda: ModelDeltaTracker(cached))
    return said


def dense(rank: int, world_size: int) -> list[int]:
    """Tables without a fused optimizer are not averaged. Only the first of their replicas is published."""
    spec = Spec([Table("copy", 12, "data"), Table("dense", 13, "row", kernel="dense"), Table("t", 9, "row")], bag=True)
    model = replicate(spec, world_size)
    with ModelDeltaTracker(model) as tracker:
        model.sync()
        delta = tracker.get_delta()
        assert tracker.shards["ec.embedding_bags.copy"].replica == 0
        return [len(rows) for rows in delta.values()]


def written_before(rank: int, world_size: int, num_replicas: int, mode: str) -> list[int]:
    """Return the ids that are reported after row 3 was written in place, without a hook, just before a sync."""
    model = replicate(Spec([Table("t", 20, "row")]), num_replicas)
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        model.sync()
        tracker.clear()
        (view,) = tracker.live.column_views("ec.embeddings.t")
        (weight,) = (each for each in model.parameters() if each.data_ptr() == view.data_ptr())
        with torch.no_grad():
            weight[3] += 1
        model.sync()
        return tracker.get_delta_ids()["ec.embeddings.t"].tolist()


def untouched(rank: int, world_size: int) -> None:
    """Training is the same with a tracker, bit for bit."""
    spec = Spec.every_sharding(1)
    found = []
    for is_tracked in (False, True):
        model = replicate(spec, world_size, seed=rank)
        generator = torch.Generator().manual_seed(rank)
        tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) if is_tracked else None
        for number in range(6):
            model(batch(spec, generator)).backward()
            if number % 2:
                model.sync()
        if tracker is not None:
            tracker.detach()
        with ModelDeltaTracker(model) as reader:
            found.append(bits_of(reader))
    assert all(torch.equal(found[0][fqn], rows) for fqn, rows in found[1].items())
