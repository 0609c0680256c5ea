"""Random kinds of modules, kernels, optimizers and records: each is tracked exactly, or refused with a typed error.

Changes are found by comparing copies of all sharded tensors of the model's ``state_dict``, not through the tracker, so
that a table that the tracker misses is detected.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    EmainplaceModeDefinition,
    GlobalWeightDecayDefinition,
    WeightDecayMode,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.tensor_pool import ShardedTensorPool
from torchrec.distributed.types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, TrackingMode
from delta_tracker.errors import DeltaTrackerError
from delta_tracker.predictor.served_model import find_targets
from delta_tracker.sharding.dense import dense_tensors
from tests.models import ordinary_optimizer, with_kernel
from tests.tracker.tracking_cases import differing

_ROWS, _DIM = 13, 8
_NAMES = ["t", "u"]

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "decay": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
        "weight_decay": 0.1,
    },
    "ema": {
        "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.5),
    },
    # the other two cannot be trained on a CPU, only refused
    "ensemble": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "global decay": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
        "weight_decay": 0.1,
        "global_weight_decay": GlobalWeightDecayDefinition(start_iter=0, lower_bound=0.0),
    },
}
UNTRAINABLE = ("ensemble", "global decay")


class OwnEmbeddingCollection(ShardedEmbeddingCollection):
    """A user's subclass."""


class OwnEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A user's subclass."""


class _OwnSharder(EmbeddingCollectionSharder):
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        sharded = super().shard(*args, **kwargs)
        sharded.__class__ = OwnEmbeddingCollection
        return sharded


class _OwnBagSharder(EmbeddingBagCollectionSharder):
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        sharded = super().shard(*args, **kwargs)
        sharded.__class__ = OwnEmbeddingBagCollection
        return sharded


class Replicas(DMPCollection):
    """CPU stand-in for 2D parallelism; :meth:`sync` writes all rows in place."""

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Write to all rows, as averaging replicas does."""
        del include_optimizer_state
        for weight in kernel_weights(self):
            weight.data.mul_(0.5)


class Pruning(GenericITEPModule):
    """CPU stand-in for pruning; it resets rows of its kernels like the real module."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__(table_name_to_unpruned_hash_sizes={}, lookups=None)
        self.lookups = list(collection._lookups)

    def prune(self) -> None:
        """Reset the first row of each table."""
        for lookup in self.lookups:
            for kernel in getattr(lookup, "module", lookup)._emb_modules:
                for weight in kernel.split_embedding_weights():
                    weight.data[:1].zero_()


@dataclass(frozen=True)
class Kind:
    """A kind of model; :meth:`draw` has the values."""

    module: str = "ec"
    sharding: str = "row"
    optimizer: str = "adagrad"
    record: str = "updates"
    mode: str = "id_only"
    is_replicated: bool = False
    prunes: bool = False
    stashes: bool = False

    @classmethod
    def draw(cls, draw: random.Random) -> Kind:
        """Draw a random kind; about half of them have an unusual setting."""
        module = draw.choices(
            ["ec", "ebc", "own ec", "own ebc", "fused ec", "fused ebc", "bag"], [2, 2, 2, 2, 1, 1, 1]
        )[0]
        sharding = draw.choice(["row", "table", "column"])
        if module in ("ebc", "own ebc"):
            sharding = draw.choice([sharding, "dense", "data"])
        elif module == "fused ebc":
            sharding = draw.choice(["table", "column"])
        elif module == "bag":
            sharding = "row"
        optimizer = draw.choice(list(_OPTIMIZERS))
        if optimizer == "ensemble":
            sharding = "row"  # it is set in the kernels, so every rank needs a kernel
        has_own = module in ("bag", "fused ec", "fused ebc") or sharding in ("dense", "data")
        return cls(
            module,
            sharding,
            "adagrad" if has_own else optimizer,
            draw.choices(["updates", "lookups"], [1, 3 if sharding in ("dense", "data") else 1])[0],
            draw.choice(["id_only", "embedding"]),
            draw.random() < 0.15,
            module != "bag" and draw.random() < 0.15,
        )

    @property
    def is_refused(self) -> bool:
        """True if the tracker must refuse it."""
        return (
            self.module == "bag"
            or self.optimizer in ("ema", "ensemble", "global decay")
            or self.is_replicated
            or (self.prunes and self.sharding not in ("dense", "data"))
        )


class _Model(nn.Module):
    def __init__(self, tables: nn.Module, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.tables = tables
        self.dense = nn.Linear(_DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind.module == "bag":
            return self.dense(self.tables(ids, torch.arange(len(ids) + 1))).sum()
        lengths = torch.ones_like(ids)  # one id in each bag, half of them for each table
        embedded = self.tables(KeyedJaggedTensor(keys=_NAMES, values=ids, lengths=lengths))
        if self.kind.module.endswith("ebc"):
            return self.dense(embedded.values().reshape(-1, _DIM)).sum()
        return self.dense(torch.cat([rows.values() for rows in embedded.values()])).sum()


def _tables(kind: Kind) -> tuple[nn.Module, Any]:
    """Build the unsharded tables and their sharder."""
    if kind.module == "bag":
        bag = nn.EmbeddingBag(_ROWS, _DIM, mode="sum", include_last_offset=True)
        return bag, EmbeddingBagSharder(fused_params={"learning_rate": 0.1})
    is_bag = kind.module.endswith("ebc")
    config = EmbeddingBagConfig if is_bag else EmbeddingConfig
    tables = [config(name=name, num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=[name]) for name in _NAMES]
    if kind.stashes:
        tables[0].stash_weights = True
    meta = torch.device("meta")
    if kind.module.startswith("fused"):
        collection = FusedEmbeddingBagCollection if is_bag else FusedEmbeddingCollection
        module = collection(tables, torchrec.optim.RowWiseAdagrad, {"lr": 0.1}, device=meta)
        if not is_bag:
            # torchrec 1.8 and later read these and do not define them
            module.use_gather_select = module.use_sorted_select = lambda: False
            module.use_gather_select_per_sharding = lambda: None
            module.device = meta
        return module, FusedEmbeddingBagCollectionSharder() if is_bag else FusedEmbeddingCollectionSharder()
    sharders = {
        "ec": EmbeddingCollectionSharder,
        "ebc": EmbeddingBagCollectionSharder,
        "own ec": _OwnSharder,
        "own ebc": _OwnBagSharder,
    }
    fused_params = _OPTIMIZERS[kind.optimizer] | {"learning_rate": 0.1}
    module = (EmbeddingBagCollection if is_bag else EmbeddingCollection)(tables=tables, device=meta)
    return module, sharders[kind.module](fused_params=dict(fused_params))


def build(kind: Kind) -> DistributedModelParallel:
    """Build a sharded model over all ranks."""
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    tables, sharder = _tables(kind)
    generators: dict[str, Callable[[], Any]] = {
        "row": lambda: with_kernel(row_wise(), "fused"),
        "table": lambda: with_kernel(table_wise(rank=world_size - 1), "fused"),
        "column": lambda: with_kernel(column_wise(ranks=[0, world_size - 1]), "fused"),
        "dense": lambda: with_kernel(row_wise(), "dense"),
        "data": data_parallel,
    }
    plan = construct_module_sharding_plan(
        tables,
        {name: generators[kind.sharding]() for name in (["weight"] if kind.module == "bag" else _NAMES)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        _Model(tables, kind), device=torch.device("cpu"), plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    if kind.is_replicated:
        model.__class__ = Replicas  # its constructor asserts CUDA
    if kind.prunes:
        inner(model).pruning = Pruning(inner(model).tables)
    if kind.optimizer == "ensemble":
        for lookup in inner(model).tables._lookups:
            for kernel in lookup._emb_modules:
                kernel.emb_module.optimizer = EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    return model


def inner(model: DistributedModelParallel) -> Any:
    """Return the model without its wrappers."""
    return getattr(model.module, "module", model.module) if not isinstance(model.module, _Model) else model.module


def kernel_weights(model: DistributedModelParallel) -> list[Tensor]:
    """Return the live rows of all kernels of this rank."""
    tables = inner(model).tables
    lookups = getattr(tables, "_lookups", None) or [tables._lookup]
    kernels = [kernel for lookup in lookups for kernel in getattr(lookup, "module", lookup)._emb_modules]
    return [weight for kernel in kernels for weight in kernel.split_embedding_weights()]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's rows ``[R, D]`` by FQN, of all tables in the model's ``state_dict``."""
    found = {}
    for key, value in model.state_dict().items():
        if key.startswith("tables"):
            shards = [value]
            if isinstance(value, ShardedTensor):
                shards = [
                    each.tensor for each in sorted(value.local_shards(), key=lambda each: each.metadata.shard_offsets)
                ]
            if shards:
                found[key.removesuffix(".weight")] = torch.cat([each.detach() for each in shards], dim=1).clone()
    return found


def track(rank: int, world_size: int, kind: dict[str, Any], seed: int = 0, num_events: int = 12) -> dict[str, Any]:
    """Run random events; each delta must have every changed row and, in modes with old states, the right states."""
    chosen = Kind(**kind)
    draw = random.Random(seed)  # the same events on every rank, because some are collective
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    model = build(chosen)
    try:
        tracker = ModelDeltaTracker(model, record=chosen.record, mode=TrackingMode(chosen.mode))
    except DeltaTrackerError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    ordinary = ordinary_optimizer(model, "Adam", lr=0.1)
    num_changed = 0
    events = ["train", "train", "eval", "drop", "read"]
    events += ["sync"] * chosen.is_replicated + ["prune"] * chosen.prunes
    with tracker:
        before = weights(model)
        for event in [*(draw.choice(events) for _ in range(num_events)), "read"]:
            ids = torch.randint(0, _ROWS, (4,), generator=generator)
            if event == "read":
                num_changed += _together(lambda: _check_read(tracker, chosen, before, weights(model)))  # noqa: B023
                before = weights(model)
            elif event == "sync":
                model.sync()
            elif event == "prune":
                inner(model).pruning.prune()
            elif chosen.optimizer in UNTRAINABLE:
                continue
            elif event == "eval":
                model.eval()
                with torch.no_grad():
                    model(ids)
                model.train()
            else:
                loss = model(ids)
                if event == "train":
                    ordinary.zero_grad()
                    loss.backward()
                    ordinary.step()
        assert tracker.num_hook_errors == 0
    return {"changed": num_changed}


def _together(check: Callable[[], int]) -> int:
    """Return the result of ``check``; raise on all ranks if it fails on one, so that no rank waits in a collective."""
    problem, result = "", 0
    try:
        result = check()
    except AssertionError as error:
        problem = str(error) or repr(error)
    has_failed = torch.tensor([bool(problem)])
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
    assert not has_failed, problem or "another rank failed"
    return result


def _check_read(tracker: ModelDeltaTracker, kind: Kind, before: dict[str, Tensor], now: dict[str, Tensor]) -> int:
    delta = tracker.get_delta(with_values=True)
    num_changed = 0
    for fqn, rows in now.items():
        changed = set(differing(before[fqn], rows))
        if fqn not in delta:
            assert not changed, f"{fqn} is not tracked, and rows {changed} of it changed"
            continue
        read = delta[fqn]
        assert changed <= set(read.ids.tolist()), f"{fqn}: rows {changed - set(read.ids.tolist())} are missing"
        assert kind.record == "lookups" or changed == set(read.ids.tolist())
        assert torch.equal(read.values, rows[read.ids])
        if kind.mode == "embedding":
            assert torch.equal(read.states, before[fqn][read.ids])
        num_changed += len(changed)
    return num_changed


def random_kinds(rank: int, world_size: int, seeds: list[int]) -> list[dict[str, Any]]:
    """Track one random kind for each seed; return the results."""
    outcomes = []
    for seed in seeds:
        kind = Kind.draw(random.Random(seed))
        try:
            outcome = track(rank, world_size, vars(kind), seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {kind}: {error}") from error
        outcomes.append({"kind": str(kind), "must": kind.is_refused, **outcome})
    return outcomes


def lookups_of_compared(rank: int, world_size: int, mode: str) -> dict[str, int]:
    """``record="lookups"`` adds a compared table's lookups to the rows that an ordinary optimizer changes."""
    kind = Kind("ebc", "data", record="lookups", mode=mode)
    model = build(kind)
    ordinary = ordinary_optimizer(model, "Adam", lr=0.1)
    fqn = "tables.embedding_bags.t"
    generator = torch.Generator().manual_seed(rank)
    counts = {"moved": 0, "only looked up": 0}
    with ModelDeltaTracker(model, record="lookups", mode=TrackingMode(mode)) as tracker:
        for _ in range(4):
            before = weights(model)
            ids = torch.randint(0, _ROWS, (4,), generator=generator)
            loss = model(ids)
            ordinary.zero_grad()
            loss.backward()
            ordinary.step()
            other = torch.randint(0, _ROWS, (4,), generator=generator)
            with torch.no_grad():
                model(other)
            _check_read(tracker, kind, before, weights(model))
            before = weights(model)
            with torch.no_grad():
                model(other)
            rows = tracker.get_delta()[fqn]
            assert rows.ids.tolist() == sorted(set(other[:2].tolist()))
            counts["only looked up"] += len(rows)
            moved = differing(before[fqn], weights(model)[fqn])
            assert not moved
            ordinary.step()  # without a new gradient; Adam changes rows anyway
            moved = differing(before[fqn], weights(model)[fqn])
            assert tracker.get_delta()[fqn].ids.tolist() == moved
            counts["moved"] += len(moved)
    return counts


class _Tower(ShardedEmbeddingTower):
    """Minimal tower; the real constructor needs several hosts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def subclasses_serve(rank: int, world_size: int, module: str) -> dict[str, list[str]]:
    """Predictors treat a subclass as a table and not as dense tensors, like its base."""
    model = build(Kind(module))
    return {"dense": sorted(dense_tensors(model, model)), "targets": sorted(find_targets(inner(model)))}


def stashed(rank: int, world_size: int, chosen_by: str) -> dict[str, Any] | None:
    """A table that torchrec stashes is refused, and may be skipped. None if torchrec has no such choice."""
    del rank, world_size
    try:
        manager = importlib.import_module("torchrec.distributed.memory_stashing").MemoryStashingManager
    except ModuleNotFoundError:  # before torchrec 1.6
        return None
    choose = getattr(manager, "set_stashed_tables", None)
    if not hasattr(EmbeddingConfig, "stash_weights") or (chosen_by == "planner" and choose is None):
        return None
    model = build(Kind(stashes=chosen_by == "config"))
    if chosen_by == "planner":
        choose({"t"})
    try:
        refused = ""
        try:
            ModelDeltaTracker(model)
        except DeltaTrackerError as error:
            refused = f"{type(error).__name__}: {error}"
        with ModelDeltaTracker(model, fqns_to_skip=["tables.embeddings.t"]) as tracker:
            return {"refused": refused, "skipped": list(tracker.tables)}
    finally:
        if chosen_by == "planner":
            choose(None)


def refused_modules(rank: int, world_size: int) -> dict[str, str]:
    """One error names all unknown modules with sharded parameters; skipping them avoids it."""
    model = build(Kind())
    mesh = init_device_mesh("cpu", (world_size,))
    root = nn.Module()
    root.model = model
    root.bag = inner(build(Kind("bag"))).tables
    root.split = nn.Embedding(6, 4)
    root.split.weight = nn.Parameter(distribute_tensor(root.split.weight.detach(), mesh, [Shard(0)]))
    assert isinstance(root.split.weight, DTensor)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)
    root.pool = ShardedTensorPool(env, 6, 4, torch.float32, plan, torch.device("cpu"))
    root.tower = _Tower()
    root.tower.embedding = inner(build(Kind())).tables
    said = {}
    for name, skips in {
        "all": [],
        "one skipped": ["bag"],
        "skipped": ["bag", "split", "pool", "tower"],
    }.items():
        try:
            with ModelDeltaTracker(root, fqns_to_skip=skips) as tracker:
                said[name] = " ".join(tracker.tables)
        except DeltaTrackerError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
