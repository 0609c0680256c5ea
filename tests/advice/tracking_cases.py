"""Cases of test_tracking.py that run on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torchmetrics
import torchrec
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, Publisher, RankCounters, Recovery
from delta_tracker.errors import (
    CheckpointError,
    DetachedError,
    InvalidArgumentError,
    RankFailedError,
    UnfinishedStepError,
    UnsupportedModelError,
)
from delta_tracker.integrations.dcp import SavedCounters, SavedTracker
from delta_tracker.predictor.served_model import find_targets
from delta_tracker.publisher import training
from delta_tracker.sharding import discover as discover_module
from delta_tracker.sharding import optimizer_rows
from delta_tracker.sharding.discover import discover
from delta_tracker.sharding.torchrec_api import tbe_of
from delta_tracker.tracker.checkpoint.collectives import run_on_all_ranks
from delta_tracker.tracker.rank_group import TORCH_TIMEOUT, RankGroup
from tests.advice.jobs import refused
from tests.models import Model, Spec, Table, batch, ordinary_optimizer, shard
from tests.tracker.kinds_cases import Kind, build

_FQN = "ec.embeddings.t"


def _tracks(tracker: ModelDeltaTracker, model: Any, spec: Spec) -> bool:
    """Return whether a tracker finds the rows that a batch changes."""
    tracker.clear()
    before = {fqn: tracker.read_rows(fqn) for fqn in tracker.tables}
    model(batch(spec, torch.Generator().manual_seed(1))).backward()
    changed = {fqn: (tracker.read_rows(fqn) != rows).any(1).nonzero().flatten() for fqn, rows in before.items()}
    found = tracker.get_delta_ids()
    return all(set(changed[fqn].tolist()) <= set(found[fqn].tolist()) for fqn in changed)


def modes(rank: int, world_size: int) -> None:
    """Each way out of a mode that an optimizer does not support leads to a tracker that works."""
    words = "Pass mode='ID_ONLY' or 'EMBEDDING'", "row-wise Adagrad", "fqns_to_skip"
    for mode, optimizer in (("MOMENTUM_DIFF", "Adagrad"), ("MOMENTUM_DIFF", "SGD"), ("MOMENTUM_LAST", "SGD")):
        spec = Spec([Table("t", 20, "row"), Table("u", 20, "row", kernel="dense")], bag=True, optimizer=optimizer)
        model = shard(spec)
        skipped: list[str] = []
        build = partial(ModelDeltaTracker, model, mode=mode, fqns_to_skip=skipped)
        for _ in range(2):
            error = refused(UnsupportedModelError, build, *words)
            skipped.extend(error.parts)
            if len(skipped) == 1:
                with ModelDeltaTracker(model, mode="EMBEDDING", fqns_to_skip=skipped) as tracker:
                    assert _tracks(tracker, model, spec)
        for other in ("ID_ONLY", "EMBEDDING"):
            with ModelDeltaTracker(model, mode=other) as tracker:
                assert _tracks(tracker, model, spec)
                error = refused(
                    UnsupportedModelError,
                    lambda: tracker.get_delta(with_optimizer=True),
                    "with_optimizer=False",
                    "fqns_to_skip",
                )
                tracker.get_delta(with_optimizer=False)
            with ModelDeltaTracker(model, mode=other, fqns_to_skip=list(error.parts)) as tracker:
                assert tracker.get_delta(with_optimizer=True).num_rows == 0
        trained = Spec([Table("t", 20, "row")])
        model = shard(trained)
        with ModelDeltaTracker(model, mode=mode) as tracker:
            assert _tracks(tracker, model, trained)


def before_sharding(rank: int, world_size: int) -> None:
    """A tracker of a model that is sharded later attaches to the sharded modules."""
    for device in ("cpu", "meta"):
        spec = Spec([Table("t", 20, "row")])
        model = Model(spec, device)
        model.dense = torch.nn.Linear(8, 1)
        words = "after DistributedModelParallel or to_empty(device=...)"
        tracker = None
        if device == "meta":
            refused(UnsupportedModelError, partial(ModelDeltaTracker, model), words)
        else:
            tracker = ModelDeltaTracker(model)
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.ec.parameters(), {"lr": 0.1})
        sharder = EmbeddingCollectionSharder()
        plan = construct_module_sharding_plan(
            model.ec,
            {"t": row_wise()},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ec": plan}),
            sharders=[sharder],
        )
        if tracker is None:
            tracker = ModelDeltaTracker(sharded)
        else:
            refused(UnsupportedModelError, tracker.get_delta, "Call tracker.reattach()")
            tracker.reattach()
            assert len(tracker.get_delta_ids()[_FQN]) == 20
        assert _tracks(tracker, sharded, spec)
        tracker.detach()


class _Application:
    """State of a program, as in the examples of torch.distributed.checkpoint."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def state_dict(self) -> dict[str, Any]:
        return {"tracker": self.tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state["tracker"])


def loads_with_dcp(rank: int, world_size: int, path: str, form: str) -> None:
    """``dcp.load`` refuses a tracker and counters, and loads into the objects that the error names."""
    spec = Spec([Table("t", 20, "row")])
    with ModelDeltaTracker(shard(spec)) as tracker:
        counter = torchmetrics.SumMetric()
        counters = RankCounters({"seen": counter})
        tracker.mark_changed(_FQN, torch.tensor([rank + 1]))
        counter.update(rank + 1)
        saved: Any = counters if form == "counters" else tracker if form == "tracker" else _Application(tracker)
        dcp.save({"it": saved}, checkpoint_id=path)
        for rows in ([], [3, 4]):  # with the size of the saved state, and with another one
            if rows:
                tracker.mark_changed(_FQN, torch.tensor(rows))
            counter.update(5)
            error = refused(
                InvalidArgumentError, lambda: dcp.load({"it": saved}, checkpoint_id=path), "integrations.dcp"
            )
            assert ("SavedCounters" if form == "counters" else "SavedTracker") in error.remedy
        adapter: Any = SavedCounters(counters, path) if form == "counters" else SavedTracker(tracker, path)
        if form == "inside another object":
            adapter = _Application(adapter)
        dcp.load({"it": adapter}, checkpoint_id=path)
        if form == "counters":
            assert counter.sum_value == rank + 1
        else:
            assert tracker.get_delta_ids()[_FQN].tolist() == [rank + 1]


def one_detached(rank: int, world_size: int) -> None:
    """If one rank is detached, all raise in a collective, and all work after ``reattach()``."""
    spec = Spec([Table("t", 20, "row")])
    with ModelDeltaTracker(shard(spec)) as tracker:
        if rank:
            tracker.detach()
        kind, words = (
            (DetachedError, "Call reattach()") if rank else (RankFailedError, "Call tracker.reattach() on every rank")
        )
        refused(kind, lambda: tracker.state_dict(strategy="gather"), words)
        tracker.reattach()
        assert bool(tracker.state_dict(strategy="gather")) == (rank == 0)


def incomplete(rank: int, world_size: int) -> None:
    """Another plan needs the parts of all ranks, or an empty state."""
    with ModelDeltaTracker(shard(Spec([Table("t", 20, "table:0")]))) as tracker:
        if rank == 0:
            tracker.mark_changed(_FQN, torch.tensor([3, 15]))
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, tracker.state_dict())
    with ModelDeltaTracker(shard(Spec([Table("t", 20, "row")]))) as tracker:
        words = "Load the parts of all ranks", "load {}"
        refused(CheckpointError, lambda: tracker.load_state_dict(parts[1]), *words)
        tracker.load_state_dict({key: each for part in parts for key, each in part.items()})
        assert tracker.get_delta_ids()[_FQN].tolist() == [[3], [5]][rank]
        tracker.load_state_dict({})
        assert len(tracker.get_delta_ids()[_FQN]) == 10


def disagreeing(rank: int, world_size: int) -> None:
    """Ranks that differ, or of which one fails, agree once they do the same."""
    group = RankGroup("agreement", "run_on_all_ranks()", TORCH_TIMEOUT)

    def fail() -> dict[str, object]:
        raise OSError("no space")

    refused(RankFailedError, lambda: run_on_all_ranks(lambda: {"mode": rank}, group), "Build the same tracker")
    if rank:
        with pytest.raises(OSError, match="no space"):
            run_on_all_ranks(fail, group)
    else:
        refused(RankFailedError, lambda: run_on_all_ranks(lambda: {"mode": "a"}, group), "Fix the problem on that rank")
    run_on_all_ranks(lambda: {"mode": "a"}, group)


def recorded(rank: int, world_size: int, url: str) -> None:
    """Values are recorded in EMBEDDING mode; tensors that are whole on each rank are published as dense ones."""
    spec = Spec([Table("t", 20, "row"), Table("u", 20, "row")])
    model = shard(spec)
    ids = batch(spec, torch.Generator().manual_seed(rank))
    rows = torch.zeros(ids.values().numel(), 8)
    with ModelDeltaTracker(model, fqns_to_skip=["u"]) as tracker:
        refused(InvalidArgumentError, lambda: tracker.record_embeddings(ids, rows), "Track in EMBEDDING mode")
        for wrong, words in ((["ec.embeddings.u.weight"], ("Pass some of", "dense.weight")), ("dense", ("a module",))):
            publish = partial(Publisher, tracker, url, dense=wrong)
            if rank:
                refused(RankFailedError, publish, "Fix the problem on that rank")
            else:
                refused(InvalidArgumentError, publish, *words)
        with Publisher(tracker, url, dense=["dense.weight"]) as publisher:
            assert list(publisher.snapshot().dense) == ["dense.weight"]
        with Publisher(tracker, url, dense=model.module.dense) as publisher:
            assert list(publisher.snapshot().dense) == ["dense.weight", "dense.bias"]


def unsupported(rank: int, world_size: int, kind: str) -> None:
    """A table that cannot be tracked is skipped, or trained in another way."""
    if kind == "data type":
        spec = Spec([Table("t", 20, "row", dtype="FP16"), Table("u", 20, "row")], bag=True)
        model = shard(spec)
        with mock.patch.object(discover_module, "_DTYPES", {"FP32": torch.float32}):
            error = refused(UnsupportedModelError, lambda: ModelDeltaTracker(model), "data type", "fqns_to_skip")
            refused(InvalidArgumentError, lambda: find_targets(model), "Change its data type or its sharding plan")
            with ModelDeltaTracker(model, fqns_to_skip=list(error.parts)) as tracker:
                assert list(tracker.tables) == ["ec.embedding_bags.u"]
            usual = shard(Spec([Table("t", 20, "row"), Table("u", 20, "row")], bag=True))
            assert {"ec.embedding_bags.t", "ec.embedding_bags.u"} <= find_targets(usual).keys()
        return
    made = Kind(prunes=True) if kind == "prunes" else Kind("ebc", optimizer=kind)
    model = build(made)
    if kind == "prunes":
        refused(UnsupportedModelError, lambda: ModelDeltaTracker(model), "without pruning", "fqns_to_skip")
        skips = ["tables.embeddings.t", "tables.embeddings.u"]
        usual = build(Kind())
    else:
        error = refused(UnsupportedModelError, partial(ModelDeltaTracker, model), "another fused", "fqns_to_skip")
        skips, usual = list(error.parts), build(Kind("ebc"))
    beside = torch.nn.Module()
    beside.model, beside.usual = model, usual
    with ModelDeltaTracker(beside, fqns_to_skip=[f"model.{fqn}" for fqn in skips]) as tracker:
        assert tracker.tables
        assert all(fqn.startswith("usual.") for fqn in tracker.tables)
    ModelDeltaTracker(usual).detach()


def unrecoverable(rank: int, world_size: int, url: str, kind: str) -> None:
    """A table whose training state cannot be published is published without it; a cut waits for the optimizer."""
    spec = Spec([Table("t", 20, "row")], bag=True)
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    optimizer = ordinary_optimizer(model, "SGD", lr=0.1)
    publish = partial(Publisher, tracker, url, recovery=Recovery(training_state={"dense": optimizer}))
    optimizer.save_param_groups(True)
    tbe = tbe_of(next(each for each in discover(model).kernels if each.is_fused).module)
    if kind == "in progress":
        with publish() as publisher:
            output = model(batch(spec, torch.Generator().manual_seed(1)))
            with mock.patch.object(training, "_UPDATE_SECONDS", 0.01):
                refused(UnfinishedStepError, publisher.publish, "after the optimizer step")
            output.backward()
            optimizer.step()
            tracker.step()
            assert publisher.publish().version == 1
        return
    if kind == "counters":
        tbe.use_rowwise_bias_correction = True
        refused(UnsupportedModelError, publish, "another fused optimizer", "publish without recovery=")
    else:
        with mock.patch.object(optimizer_rows, "TABLE_DTYPES", {"float16"}):
            refused(
                UnsupportedModelError, lambda: publish().snapshot(), "float32, float16 or bfloat16", "without recovery="
            )
    with Publisher(tracker, f"{url}/other") as publisher:
        assert publisher.snapshot().version == 1
