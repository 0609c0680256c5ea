"""Cases for ways to train: when an update happens, is repeated or fails; each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.sharding.kernel_hooks import _lookup_node
from tests.models import Spec, Table, batch, kernels_of, lookups_of, ordinary_optimizer, shard
from tests.tracker.tracking_cases import _Copy, differing, rows_of


class _Parts(nn.Module):
    """A sharded model in two parts: the lookups, and the layers above them."""

    def __init__(self, model: DistributedModelParallel, spec: Spec) -> None:
        super().__init__()
        self.ec, self.dense = model.module.ec, model.module.dense
        self.names, self.is_bag = spec.features, spec.bag

    def lookup(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.ec(features)
        return embedded.values() if self.is_bag else torch.cat([embedded[name].values() for name in self.names])

    def rest(self, rows: Tensor) -> Tensor:
        return self.dense(rows.reshape(-1, 8)).sum()

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = self.rest(self.lookup(features))
        return loss, loss


def _spec(world_size: int, bag: bool) -> Spec:
    last = world_size - 1
    places = {"row": "row", "first": "table:0", "last": f"table:{last}", "column": f"column:0,{last}"}
    return Spec([Table(name, 17, place) for name, place in places.items()], bag=bag)


def _nothing(tracker: ModelDeltaTracker) -> dict[str, set[int]]:
    return {fqn: set() for fqn in tracker.tables}


def _read(copy: _Copy, extra: dict[str, set[int]] | None = None) -> int:
    """Read every row that differs and at most ``extra`` others; return the number of rows."""
    copy.read(_nothing(copy.tracker) if extra is None else extra)
    num_rows = copy.open[0].num_rows
    copy.commit()
    for fqn, now in rows_of(copy.tracker).items():
        assert torch.equal(copy.rows[fqn], now), fqn
    return num_rows


def pipeline(rank: int, world_size: int, bag: bool) -> list[int]:
    """Read between steps of TorchRec's pipeline, which distributes a batch's ids while it trains the previous batch."""
    spec = _spec(world_size, bag)
    model = shard(spec)
    parts = _Parts(model, spec)
    generator = torch.Generator().manual_seed(rank)
    batches: Iterator[KeyedJaggedTensor] = iter([batch(spec, generator) for _ in range(8)])
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        optimizer = torch.optim.SGD(parts.dense.parameters(), lr=0.1)
        trainer = TrainPipelineSparseDist(parts, optimizer, torch.device("cpu"), execute_all_batches=True)
        counts = []
        for _ in range(8):
            trainer.progress(batches)
            tracker.step()
            counts.append(_read(copy))
        assert tracker.num_hook_errors == 0
        return counts


def accumulation(rank: int, world_size: int) -> None:
    """Read between several backward passes before one ordinary optimizer step, without calling the tracker's step()."""
    spec = _spec(world_size, bag=True)
    spec.tables[0].kernel = "dense"
    model = shard(spec)
    ordinary = ordinary_optimizer(model, "Adam", lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, auto_compact=True) as tracker:
        copy = _Copy(tracker, "default")
        for _ in range(3):
            ordinary.zero_grad()
            for _ in range(3):
                loss = model(batch(spec, generator)) / 3
                assert _read(copy) == 0
                loss.backward()
                assert _read(copy) > 0
            ordinary.step()
            assert len(tracker.get_delta(commit=False)["ec.embedding_bags.row"])
            _read(copy)
        assert tracker.num_batches == 0
        assert tracker.num_hook_errors == 0


def checkpointed(rank: int, world_size: int, around: str, use_reentrant: bool, bag: bool) -> None:
    """Run a part of the forward again inside the backward, with or without a graph in the first run."""
    spec = _spec(world_size, bag)
    model = shard(spec)
    parts = _Parts(model, spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        for _ in range(3):
            features = batch(spec, generator)
            if around == "lookup":  # a reentrant checkpoint needs an input with a gradient

                def lookup(one: Tensor, features: KeyedJaggedTensor = features) -> Tensor:
                    return parts.lookup(features) * one

                rows = checkpoint(lookup, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)
                loss = parts.rest(rows)
            else:
                loss = checkpoint(parts.rest, parts.lookup(features), use_reentrant=use_reentrant)
            assert _read(copy) == 0
            loss.backward()
            assert _read(copy) > 0
        assert tracker.num_hook_errors == 0


def second_backward(rank: int, world_size: int) -> None:
    """Every backward of a retained graph is an update, with or without a read in between."""
    spec = _spec(world_size, bag=False)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        loss, other = model(batch(spec, generator)), model(batch(spec, generator))
        for late in (True, True, False):
            loss.backward(retain_graph=late)
            assert _read(copy) > 0
        other.backward(retain_graph=True)
        other.backward()
        assert _read(copy) > 0


class _BoomError(RuntimeError):
    """Error of the user's code."""


def _boom(*_: object) -> None:
    raise _BoomError


def raising(rank: int, world_size: int, where: str) -> list[int]:
    """Raise in the user's backward before, at or after the lookup's node, and continue training."""
    spec = Spec([Table("t", 30, "row")])
    model = shard(spec)
    parts = _Parts(model, spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        (kernel,) = kernels_of(model.module.ec)
        early = torch.ones(1, requires_grad=True) * 2  # older than the lookup, so its backward is later
        hook = kernel.register_forward_hook(
            lambda module, args, output: (
                _lookup_node(output).register_prehook(_boom) and None if where == "at" else None
            )
        )
        rows = parts.lookup(batch(spec, generator, size=6))
        hook.remove()
        if where == "before":
            rows.register_hook(_boom)
        elif where == "after":
            early.register_hook(_boom)
        loss = parts.rest(rows) + early.sum()
        try:
            loss.backward()
        except _BoomError:
            pass
        else:
            raise AssertionError("nothing was raised")
        (store,) = tracker._log.segments.stores.values()
        half_done = {fqn: {row for ids in store.writes.values() for row in ids.tolist()} for fqn in tracker.tables}
        assert any(half_done.values()) == (where == "at"), "only a backward that raised at the node proves nothing"
        counts = [_read(copy, half_done)]
        for _ in range(3):
            model(batch(spec, generator)).backward()
            counts.append(_read(copy, half_done))
        assert tracker.num_hook_errors == 0
        return counts


def managed_collision(rank: int, world_size: int, mode: str) -> dict[str, int]:
    """Track a managed-collision EC by remapped row, including rows that an eviction resets before any update."""
    from tests.tracker.collision_cases import collision_batch, shard_collision  # noqa: PLC0415  it imports a lot

    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    counts = {"changed": 0, "evicted": 0}
    sharded = model.module.mc
    first, second = (ModelDeltaTracker(model, mode=TrackingMode(mode)) for _ in range(2))
    for number in range(20):
        before = rows_of(first)
        loss = model(collision_batch(generator))
        if number % 3 == 0:  # rows that the forward wrote
            forward = first.get_delta(commit=False)
            for fqn, now in rows_of(first).items():
                assert forward[fqn].ids.tolist() == differing(before[fqn], now), fqn
                counts["evicted"] += len(forward[fqn])
        if number % 4:
            loss.backward()
        for tracker in (first, second):
            for fqn, rows in tracker.get_delta().items():
                assert rows.ids.tolist() == differing(before[fqn], tracker.read_rows(fqn)), fqn
                if mode == "embedding":
                    assert rows.known.all()
                    assert torch.equal(rows.states, before[fqn][rows.ids]), fqn
                counts["changed"] += len(rows)
        assert first.num_hook_errors == second.num_hook_errors == 0
    first.detach()
    assert "_evict" in sharded.__dict__
    second.detach()
    assert "_evict" not in sharded.__dict__
    return counts


def loaded(rank: int, world_size: int, bag: bool, through: str) -> None:
    """``load_state_dict`` marks all rows of a fused table, and only the changed rows of a compared table."""
    spec = _spec(world_size, bag)
    if bag:
        spec.tables.append(Table("dense", 17, "row", kernel="dense"))
        spec.tables.append(Table("replicated", 17, "data"))
        spec.features += ["dense", "replicated"]
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    own_hooks = len(model.module.ec._load_state_dict_post_hooks)
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    start = rows_of(tracker)
    model(batch(spec, generator)).backward()
    saved = {key: _changed_copy(value) for key, value in model.state_dict().items()}
    before = rows_of(tracker)
    if through == "collection":
        model.module.ec.load_state_dict({key.removeprefix("ec."): saved[key] for key in saved if key.startswith("ec.")})
    else:
        (model if through == "model" else model.module).load_state_dict(dict(saved))
    delta = tracker.get_delta(with_values=True)
    for fqn, now in rows_of(tracker).items():
        moved, ids = differing(before[fqn], now), delta[fqn].ids.tolist()
        assert not now.numel() or moved == [1], (fqn, moved)
        is_compared = fqn.endswith(("dense", "replicated"))
        assert ids == (differing(start[fqn], now) if is_compared else list(range(len(now)))), fqn
        if now.numel():
            assert torch.equal(delta[fqn].values, now[ids])
            known = delta[fqn].ids[delta[fqn].known]
            assert torch.equal(delta[fqn].states[delta[fqn].known], start[fqn][known])
            assert len(known) == len(ids) if is_compared else len(known) < len(ids)
    assert tracker.get_delta().num_rows == 0
    tracker.detach()
    model.load_state_dict(dict(saved))
    assert len(model.module.ec._load_state_dict_post_hooks) == own_hooks
    assert tracker.num_hook_errors == 0


def _changed_copy(value: Any) -> Any:
    """Copy an entry of a state dict, with row 1 of every shard changed."""
    import copy  # noqa: PLC0415

    value = copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)
    shards = [each.tensor for each in value.local_shards()] if hasattr(value, "local_shards") else [value]
    for tensor in shards:
        if isinstance(tensor, Tensor) and len(tensor) > 1:
            tensor[1] += 1
    return value


def reattached(rank: int, world_size: int) -> None:
    """Detaching and re-attaching loses no row; re-attaching to modules that are already tracked keeps the log."""
    spec = _spec(world_size, bag=False)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model)
    copy = _Copy(tracker, "default")
    model(batch(spec, generator)).backward()
    tracker.reattach()
    assert _read(copy) > 0
    model(batch(spec, generator)).backward()
    tracker.detach()
    model(batch(spec, generator)).backward()
    tracker.reattach()
    everything = {fqn: set(range(len(rows))) for fqn, rows in rows_of(tracker).items()}
    assert _read(copy, everything) == sum(map(len, everything.values()))
    copy.allowed = _nothing(tracker)
    model(batch(spec, generator)).backward()
    assert _read(copy) > 0
    assert tracker.num_hook_errors == 0
    tracker.detach()


def resharded(rank: int, world_size: int, trains_between: bool) -> dict[str, Any]:
    """Let TorchRec move a table to another rank, which recreates every lookup."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: PLC0415
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: PLC0415
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise  # noqa: PLC0415

    from tests.models import with_kernel  # noqa: PLC0415

    spec = Spec([Table("moves", 12, "table:0"), Table("stays", 12, "table:0")], bag=True)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    table = EmbeddingBagConfig(name="moves", num_embeddings=12, embedding_dim=8, feature_names=["moves"])
    plan = construct_module_sharding_plan(
        EmbeddingBagCollection(device=torch.device("meta"), tables=[table]),
        {"moves": with_kernel(table_wise(rank=1), "fused")},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    with ModelDeltaTracker(model) as tracker:
        copy = _Copy(tracker, "default")
        model(batch(spec, generator)).backward()
        assert (_read(copy) > 0) == (rank == 0)
        model(batch(spec, generator)).backward()  # pending while the table moves
        _reshard(model, plan)
        if trains_between:
            tracker.get_delta()
            model(batch(spec, generator)).backward()  # on lookups without hooks
        held, hooks = tracker.shards, tracker._hooks.registered
        with mock.patch.object(ModelDeltaTracker, "_make_stores", side_effect=MemoryError), pytest.raises(MemoryError):
            tracker.reattach()
        assert tracker.shards == held, "the tracker changed although it could not be attached"
        assert tracker._hooks.registered == hooks
        tracker.reattach()
        shards = {fqn.rpartition(".")[2]: spec.num_rows for fqn, spec in tracker.shards.items()}
        copy.rows = {fqn: torch.full_like(rows, torch.nan) for fqn, rows in rows_of(tracker).items()}
        _read(copy)  # all rows that this rank now holds
        model(batch(spec, generator)).backward()
        counts = _read(copy)
        assert tracker.num_hook_errors == 0
        return {"shards": shards, "rows": counts}


def _reshard(model: DistributedModelParallel, plan: Any) -> None:
    from torchrec.distributed.types import EmbeddingModuleShardingPlan  # noqa: PLC0415

    changed = EmbeddingModuleShardingPlan(dict(plan))
    model.reshard({"ec": (0.0, changed)}, "ec")


def chained(rank: int, world_size: int, order: list[str]) -> None:
    """Other hooks on the same modules and in TorchRec's slot, some replacing the output, are removed in any order."""
    spec = _spec(world_size, bag=False)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    lookups, kernels = lookups_of(model.module.ec), kernels_of(model.module.ec)
    calls = dict.fromkeys(("before", "after", "slot"), 0)

    def hook(name: str) -> Callable[..., Any]:
        def count(module: object, args: object, output: Any) -> Any:
            calls[name] += 1
            return output * 1.0 if isinstance(output, Tensor) else None

        return count

    def slot(features: object, embeddings: object, *_: object) -> None:
        calls["slot"] += 1

    removers: dict[str, list[Callable[[], object]]] = {}
    removers["before"] = [module.register_forward_hook(hook("before")).remove for module in [*lookups, *kernels]]
    model.module.ec.register_post_lookup_tracker_fn(slot)
    tracker = ModelDeltaTracker(model)
    removers["ours"] = [tracker.detach]
    removers["after"] = [module.register_forward_hook(hook("after")).remove for module in [*lookups, *kernels]]
    copy = _Copy(tracker, "default")
    for name in [*order, ""]:
        seen = dict(calls)
        model(batch(spec, generator)).backward()
        assert calls["slot"] > seen["slot"]
        for other in ("before", "after"):
            assert (calls[other] > seen[other]) == (other in removers), other
        if "ours" in removers:
            assert _read(copy) > 0
        for remove in removers.pop(name, []):
            remove()
    assert not any(module._forward_hooks for module in [*lookups, *kernels])
    assert tracker.num_hook_errors == 0
