"""Cases for the tracker's state in a checkpoint, on real sharded models; each runs on every rank.

One case trains and saves, another one restores, possibly on another number of ranks under another plan. Both leave what
they hold in files, which the test compares.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.changes import LogState
from delta_tracker.checkpoint.dcp import SavedTracker
from delta_tracker.checkpoint.stateful import Restored
from tests.models import Spec, Table, batch, is_dense, ordinary_optimizer, shard

CONSUMERS = ["a", "b", "c"]


def build(spec: dict[str, Any], mode: str) -> tuple[Spec, Any, ModelDeltaTracker]:
    made = Spec([Table(**table) for table in spec["tables"]], **{key: spec[key] for key in spec if key != "tables"})
    model = shard(made)
    return made, model, ModelDeltaTracker(model, CONSUMERS, mode=TrackingMode(mode))


def train(spec: Spec, model: Any, generator: torch.Generator, num_batches: int) -> None:
    ordinary = ordinary_optimizer(model, "SGD", lr=0.1)
    for _ in range(num_batches):
        ordinary.zero_grad()
        model(batch(spec, generator)).backward()
        ordinary.step()


def dump(tracker: ModelDeltaTracker, state: LogState, file: Path) -> None:
    """What is pending on this rank, with global ids, and the rows that it holds."""
    held: dict[str, Any] = {"num_batches": state.num_batches}
    for fqn, spec in tracker.shards.items():
        held[fqn] = {
            "rows": [spec.row_offset, spec.row_offset + spec.num_rows],
            "columns": [list(each) for each in spec.columns],
            "replicated": spec.is_replicated,
            "weights": tracker.read_rows(fqn),
        }
        for name, consumer in state.consumers.items():
            assert not consumer.is_behind
            rows = consumer.rows.get(fqn)
            if rows is None:
                continue
            held[fqn][name] = {
                "ids": rows.ids + spec.row_offset,
                "states": rows.states,
                "known": rows.known,
                "ages": torch.zeros_like(rows.ids) if rows.ages is None else rows.ages.long(),
            }
    torch.save(held, file)


def same(left: LogState, right: LogState) -> bool:
    """Whether two states of one rank are equal, bit for bit."""
    for name, consumer in left.consumers.items():
        for fqn, rows in consumer.rows.items():
            other = right.consumers[name].rows.get(fqn)
            if other is None:
                if len(rows):
                    return False
                continue
            for mine, its in ((rows.ids, other.ids), (rows.states, other.states), (rows.known, other.known)):
                if mine is not None and not torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0)):
                    return False
    return left.num_batches == right.num_batches


def saving(rank: int, world_size: int, path: str, spec: dict[str, Any], mode: str, how: str = "sync") -> list[int]:
    """Train; read, leave out, seal; save. Saving changes nothing."""
    made, model, tracker = build(spec, mode)
    generator = torch.Generator().manual_seed(rank)
    for number in range(5):
        train(made, model, generator, 1)
        tracker.step()
        if number in (1, 2):
            tracker.get_delta("a", top_k=None if mode == "id_only" else TopK(rows=4))
        if number == 2:
            tracker.get_delta("b")
    train(made, model, generator, 1)
    sealed = tracker.get_delta("c", commit=False)
    train(made, model, generator, 1)
    tracker.annotate("b", {"rank": rank, "stream": "00ff"})
    before = tracker._log.state()
    dump(tracker, before, Path(path) / f"saved-{rank}of{world_size}.pt")
    tensors = {name for name, _ in model.state_dict().items()}
    assert tensors == {name for name in tensors if name.startswith(("ec.", "dense."))}, "no tracker tensor in it"
    checkpoint = {"model": model, "tracker": tracker}
    if how == "sync":
        dcp.save(checkpoint, checkpoint_id=f"{path}/checkpoint")
    else:
        stager = BlockingAsyncStager()  # the newer one cannot copy a ShardedTensor
        saved = dcp.async_save(checkpoint, checkpoint_id=f"{path}/checkpoint", async_stager=stager)
        saved.result()
    torch.save(tracker.state_dict(), Path(path) / f"part-{rank}of{world_size}.pt")
    assert same(before, tracker._log.state())
    assert same(tracker._log.state(), before)
    tracker.commit(sealed)
    tracker.detach()
    return [sum(len(rows) for rows in consumer.rows.values()) for consumer in before.consumers.values()]


def loading(rank: int, world_size: int, path: str, spec: dict[str, Any], mode: str, again: str | None = None) -> None:
    """Restore, under the plan of ``spec``; save ``again``; go on."""
    made, model, tracker = build(spec, mode)
    train(made, model, torch.Generator().manual_seed(100 + rank), 1)  # leaves something to be forgotten
    tracker.step()
    dcp.load(
        {"model": model, "tracker": SavedTracker(tracker, f"{path}/checkpoint")}, checkpoint_id=f"{path}/checkpoint"
    )
    assert tracker.restored is Restored.STATE
    assert tracker.annotations == {"b": {"rank": 0, "stream": "00ff"}}
    restored = tracker._log.state()
    dump(tracker, restored, Path(path) / f"loaded-{rank}of{world_size}.pt")
    if again is not None:
        dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{again}/checkpoint")
        dump(tracker, restored, Path(again) / f"saved-{rank}of{world_size}.pt")
    train(made, model, torch.Generator().manual_seed(rank), 2)
    for name in CONSUMERS:
        delta = tracker.get_delta(name, commit=False)
        for fqn, rows in delta.items():
            old = restored.consumers[name].rows.get(fqn)
            if old is None:
                continue
            now = tracker._log.read(name).rows[fqn]
            at = torch.isin(now.ids, old.ids)
            assert torch.equal(now.ids[at], old.ids), fqn
            if old.states is not None:
                assert torch.equal(now.states[at], old.states), "the oldest value stays"
            assert len(rows) == len(now)
    assert tracker.num_hook_errors == 0
    tracker.detach()
