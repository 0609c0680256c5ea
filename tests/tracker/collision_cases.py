"""Minimal managed-collision EmbeddingCollection that trains on CPU, row-wise and fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.optim import Adagrad  # row-wise Adagrad's rows cannot be reset on CPU
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows
from delta_tracker.tracker.checkpoint.part import pack
from delta_tracker.tracker.cursors import LogState, PendingState
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.types import Identity
from tests.models import with_kernel
from tests.publisher.publishing_cases import attempt

_TABLES = ("a", "b")
_NUM_IDS = 60
_NUM_ROWS = 16


class CollisionModel(nn.Module):
    def __init__(self, module: Callable[..., nn.Module]) -> None:
        super().__init__()
        device = torch.device("cpu")
        tables = [
            EmbeddingConfig(name=name, num_embeddings=_NUM_ROWS, embedding_dim=4, feature_names=[name])
            for name in _TABLES
        ]
        modules = {
            name: module(
                zch_size=_NUM_ROWS,
                device=device,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=2,
                input_hash_size=_NUM_IDS,
            )
            for name in _TABLES
        }
        collection = EmbeddingCollection(tables=tables, device=device)
        self.mc = ManagedCollisionEmbeddingCollection(collection, ManagedCollisionCollection(modules, tables))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded, _ = self.mc(features)
        return torch.cat([embedded[name].values() for name in _TABLES]).sum()


def shard_collision(
    world_size: int, *, module: Callable[..., nn.Module] = MCHManagedCollisionModule
) -> DistributedModelParallel:
    torch.manual_seed(0)
    model = CollisionModel(module)
    apply_optimizer_in_backward(Adagrad, model.mc._embedding_module.parameters(), {"lr": 0.1})
    sharder = ManagedCollisionEmbeddingCollectionSharder(ec_sharder=EmbeddingCollectionSharder(use_index_dedup=False))
    plan = construct_module_sharding_plan(
        model.mc,
        dict.fromkeys(_TABLES, with_kernel(row_wise(), "fused")),
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"mc": plan}),
        sharders=[sharder],
    )


def collision_batch(generator: torch.Generator, size: int = 4) -> KeyedJaggedTensor:
    """Return a batch of random ids from a range far larger than the table, so that ids are evicted."""
    lengths = torch.randint(1, 3, (len(_TABLES) * size,), generator=generator)
    ids = torch.randint(0, _NUM_IDS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(_TABLES), ids, lengths=lengths)


def module_of(model: DistributedModelParallel, table: str) -> nn.Module:
    """Return this rank's managed-collision module of a table."""
    return model.module.mc._managed_collision_collection._managed_collision_modules[table]


def owners_by_lookup(model: DistributedModelParallel, table: str) -> list[int]:
    """Return the owner of each local slot, found by remapping every raw id on this rank."""
    module = module_of(model, table)
    raw_ids = torch.arange(_NUM_IDS)
    features = {table: JaggedTensor(raw_ids, lengths=torch.ones_like(raw_ids))}
    remapped = (module.remap(features)[table].values() - module._output_global_offset).tolist()
    default = module._zch_size - 1
    owners = [NO_OWNER] * module._zch_size
    for raw_id, slot in enumerate(remapped):
        if slot != default:
            assert owners[slot] == NO_OWNER
            owners[slot] = raw_id
    return owners


def raw_ids_of_deltas(rank: int, world_size: int, num_steps: int) -> dict[str, Any]:
    """Compare raw ids and evicted ids of two consumers' deltas with those that each had at its own last read."""
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    tracker = ModelDeltaTracker(model, ["often", "rarely"])
    names = {fqn: fqn.rpartition(".")[2] for fqn in tracker.tables}
    start = {fqn: owners_by_lookup(model, name) for fqn, name in names.items()}
    held = {consumer: dict(start) for consumer in tracker.consumers}
    ever: dict[tuple[str, int], set[int]] = {}
    counts = {"evicted": 0, "readmitted": 0}
    for number in range(num_steps):
        model(collision_batch(generator)).backward()
        for consumer in ["often"] + ["rarely"] * (number % 7 == 6):
            delta = tracker.get_delta(consumer)
            for fqn, rows in delta.items():
                before, now = held[consumer][fqn], owners_by_lookup(model, names[fqn])
                ids = rows.ids.tolist()
                assert rows.raw_ids.tolist() == [now[slot] for slot in ids]
                moved = [before[slot] != now[slot] for slot in ids]
                assert rows.evicted.tolist() == _where(moved, before, ids)
                assert rows.admitted.tolist() == _where(moved, now, ids)
                assert {slot for slot in range(len(now)) if now[slot] != before[slot]} <= set(ids)
                assert tracker.live.owner_views()[fqn].tolist() == now
                held[consumer][fqn] = now
                counts["evicted"] += int((rows.evicted != NO_OWNER).sum())
                for slot in ids if consumer == "often" else []:
                    past = ever.setdefault((fqn, slot), set())
                    counts["readmitted"] += before[slot] != now[slot] and now[slot] in past
                    past.add(now[slot])
    assert tracker.num_hook_errors == 0
    tracker.detach()
    return counts | {"identities": str(tracker.live.identities)}


def _where(moved: list[bool], owners: list[int], ids: list[int]) -> list[int]:
    return [owners[slot] if is_moved else NO_OWNER for slot, is_moved in zip(ids, moved, strict=True)]


def left_out_owners(rank: int, world_size: int, scored: bool) -> int:
    """Read with top-k of one row; return the number of rows with a changed owner that were selected."""
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    mode = TrackingMode.ID_ONLY if scored else TrackingMode.EMBEDDING
    top_k = TopK(rows=1, score=(lambda _, rows: torch.zeros(len(rows))) if scored else None)
    count = num_left_out = 0
    with ModelDeltaTracker(model, mode=mode) as tracker:
        sent = {fqn: view.clone() for fqn, view in tracker.live.owner_views().items()}
        for _ in range(25):
            model(collision_batch(generator)).backward()
            delta = tracker.get_delta(top_k=top_k)
            num_left_out += delta.pending_rows
            for fqn, rows in delta.items():
                count += int((rows.raw_ids != sent[fqn][rows.ids]).sum())
                sent[fqn][rows.ids] = rows.raw_ids
                assert torch.equal(sent[fqn], tracker.live.owner_views()[fqn])
                # A row that was left out earlier has no new owner, and one that was sent has its own former owner.
                kept = delta.left_out.get(fqn)
                assert kept is None or torch.equal(kept.former, sent[fqn][kept.ids])
    assert num_left_out > 0
    return count


def checkpoint_of_owners(rank: int, world_size: int) -> None:
    """Save pending rows and load them into another tracker, with and without the former owners."""
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, ["a", "b"]) as tracker, ModelDeltaTracker(model, ["a", "b"]) as other:
        for number in range(12):
            model(collision_batch(generator)).backward()
            if number == 6:
                tracker.get_delta("b")
        state = tracker.state_dict()
        expected = {name: tracker.get_delta(name, commit=False) for name in ("a", "b")}
        other.load_state_dict(state)
        for name, delta in expected.items():
            for fqn, rows in other.get_delta(name, commit=False).items():
                for column in ("ids", "raw_ids", "admitted", "evicted"):
                    assert torch.equal(getattr(rows, column), getattr(delta[fqn], column)), (name, fqn, column)
        assert sum(int((rows.evicted != NO_OWNER).sum()) for rows in expected["b"].values()) > 0
        # An earlier release saves no former owners. They are then unknown, and top-k leaves no row with an owner out.
        unknown = tracker._log.state()
        bare = {
            name: replace(each, rows={fqn: replace(rows, former=None) for fqn, rows in each.rows.items()})
            for name, each in unknown.consumers.items()
        }
        other._log.restore(replace(unknown, consumers=bare))
        delta = other.get_delta("a", top_k=TopK(rows=1, score=lambda _, rows: torch.zeros(len(rows))))
        for fqn, rows in delta.items():
            assert (rows.evicted == NO_OWNER).all()
            left_out = delta.left_out[fqn].ids if fqn in delta.left_out else rows.ids[:0]
            assert (other.live.owner_views()[fqn][left_out] == NO_OWNER).all()


def resharded_owners(rank: int, world_size: int) -> str:
    """Load the states of two ranks on one; return the error for a state with too few former owners."""
    with ModelDeltaTracker(shard_collision(world_size), ["a"]) as tracker:
        fqn = next(iter(tracker.tables))
        saved: dict[str, Tensor] = {}
        for part, former in enumerate((torch.tensor([40, NO_OWNER]), None, torch.tensor([41]))):
            shards = {
                name: replace(spec, row_offset=8 * (part % 2), num_rows=8) for name, spec in tracker.shards.items()
            }
            rows = {fqn: ChangedRows(torch.tensor([1, 5]), former=former)}
            state = LogState(3, {"a": PendingState(0, rows)})
            saved |= pack(part % 2, 2, tracker.mode.value, shards, state, {}, {})
            if part == 1:
                tracker.load_state_dict(saved)
                delta = tracker.get_delta()[fqn]
                assert delta.ids.tolist() == [1, 5, 9, 13]
                assert delta.evicted.tolist() == [40, *[NO_OWNER] * 3]
                saved = {name: tensor for name, tensor in saved.items() if name.startswith("rank1")}
        return attempt(lambda: tracker.load_state_dict(saved))


def reattached_owners(rank: int, world_size: int) -> None:
    """Detach, train, attach again: the rows are pending, with the owners of the last read."""
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        for _ in range(9):
            model(collision_batch(generator)).backward()
        tracker.get_delta()
        before = {fqn: view.clone() for fqn, view in tracker.live.owner_views().items()}
        tracker.detach()
        for _ in range(9):
            model(collision_batch(generator)).backward()
        tracker.reattach()
        for fqn, rows in tracker.get_delta().items():
            now = torch.tensor(owners_by_lookup(model, fqn.rpartition(".")[2]))
            assert torch.equal(rows.raw_ids, now)
            assert torch.equal(rows.evicted, torch.where(before[fqn] == now, NO_OWNER, before[fqn]))
            assert (rows.evicted != NO_OWNER).any()


def _described(identity: Identity) -> tuple[int, list[tuple[int, int]], list[int | None]]:
    return identity.hash_size, [each.rows for each in identity.buckets], [each.default for each in identity.buckets]


def buckets(rank: int, world_size: int) -> tuple[int, list[tuple[int, int]], list[int | None]]:
    """Return the identity of a table whose module has loaded the segments of another sharding."""
    model = shard_collision(world_size)
    module_of(model, "a")._output_segments_tensor.copy_(torch.tensor([0, _NUM_ROWS] + [-1] * 1023))
    with ModelDeltaTracker(model) as tracker:
        return _described(tracker.live.identities["mc._embedding_module.embeddings.a"])


def hash_zch(rank: int, world_size: int) -> dict[str, Any]:
    """Read written owners of hash-ZCH, which does not train on the CPU."""
    model = shard_collision(world_size, module=_hash_module)
    fqn = "mc._embedding_module.embeddings.a"
    owners = module_of(model, "a")._hash_zch_identities.data[:, 0]
    refused: dict[str, str] = {}
    with ModelDeltaTracker(model) as tracker:
        assert tracker._log.segments.owners[fqn].source.falls_back, "the default of hash-ZCH, which is logged"
        owners[:5] = torch.tensor([3, -1, 5, -1, 16])
        rows = tracker.get_delta()[fqn]
        assert rows.ids.tolist() == [0, 2, 4]
        assert rows.raw_ids.tolist() == [3, 5, 16]
        assert rows.evicted.tolist() == [NO_OWNER] * 3
        owners[0], owners[2] = 7, -1
        rows = tracker.get_delta()[fqn]
        assert rows.raw_ids.tolist() == [7, NO_OWNER]
        assert rows.evicted.tolist() == [3, 5]
        valid = owners.clone()
        for name, slots, raw_id in (
            ("reserved", [1], NO_OWNER), ("twice", [8, 9], 31), ("bucket", [0], 16), ("valid", [1], 2)
        ):  # fmt: skip
            owners.copy_(valid)
            tracker._log.state()  # sees the valid owners
            owners[slots] = raw_id
            owners[4] = -1 if name == "bucket" else owners[4]
            refused[name] = attempt(tracker.get_delta)
        return {
            "identity": _described(tracker.live.identities[fqn]),
            "refused": refused,
        }


def _hash_module(**arguments: Any) -> nn.Module:
    # Its import warns, which would be an error where pytest looks for doctests.
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule  # noqa: PLC0415

    return HashZchManagedCollisionModule(
        zch_size=arguments["zch_size"],
        device=arguments["device"],
        total_num_buckets=4,
        input_hash_size=arguments["input_hash_size"],
    )


class _Constant(ManagedCollisionModule):
    """Stand-in for a managed-collision module of a user."""

    def __init__(self, module: MCHManagedCollisionModule) -> None:
        nn.Module.__init__(self)
        self._module = module


def other_modules(rank: int, world_size: int) -> dict[str, Any]:
    """Return the errors for a module of a user, and for a module of another size than the shard."""
    model = shard_collision(world_size)
    modules = model.module.mc._managed_collision_collection._managed_collision_modules
    held = modules["a"]
    modules["a"] = _Constant(held)
    answer: dict[str, Any] = {"refused": attempt(lambda: ModelDeltaTracker(model))}
    with ModelDeltaTracker(model, fqns_to_skip=["a"]) as tracker:
        answer["skipped"] = list(tracker.live.identities)
    modules["a"] = held.rebuild_with_output_id_range((0, 8), [0, 8, 16])
    answer["ranges"] = attempt(lambda: ModelDeltaTracker(model))
    modules["a"] = held
    # A user's own module maps the ids before the table looks them up.
    model.apart = CollisionModel(MCHManagedCollisionModule).mc._managed_collision_collection
    del model.apart._managed_collision_modules["b"]
    answer["apart"] = attempt(lambda: ModelDeltaTracker(model))
    with ModelDeltaTracker(model, fqns_to_skip=["a"]) as tracker:
        answer["apart, skipped"] = list(tracker.live.identities)
    return answer


def interrupted_eviction(rank: int, world_size: int, method: str, number: int) -> list[str]:
    """Interrupt one call of a method of the change logs of three trackers during an eviction, and continue to train.

    Return the promises that break.
    """
    del rank
    model = shard_collision(world_size)
    generator = torch.Generator().manual_seed(0)
    for _ in range(9):  # until the modules are full
        model(collision_batch(generator)).backward()
    trackers = [ModelDeltaTracker(model) for _ in range(3)]
    before = [tracker.read_tables() for tracker in trackers]
    own, calls = getattr(LogWrites, method), itertools.count()

    def interrupted(log: LogWrites, *args: Any, **kwargs: Any) -> None:
        own(log, *args, **kwargs)
        if next(calls) == number:
            raise KeyboardInterrupt

    is_interrupted = False
    with mock.patch.object(LogWrites, method, interrupted):
        for _ in range(20):
            with torch.no_grad():  # lookups that only evict
                try:
                    model(collision_batch(generator))
                except KeyboardInterrupt:
                    is_interrupted = True
                    break
    problems = [] if is_interrupted else ["no eviction was interrupted"]
    for tracker, former in zip(trackers, before, strict=True):
        sent = tracker.get_delta_ids()
        for fqn, rows in tracker.read_tables().items():
            changed = (rows != former[fqn]).any(dim=1).nonzero().flatten().tolist()
            problems += [f"row {row} of {fqn} is lost" for row in set(changed) - set(sent[fqn].tolist())]
        if any(ids.numel() for ids in tracker.get_delta_ids().values()):
            problems.append("rows are sent again")
        tracker.detach()
    return problems
