"""Models in 2D parallelism on the CPU: TorchRec's DMPCollection, which asserts CUDA, without this assertion."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torchrec
from torch import distributed as dist
from torch import nn
from torch.distributed import _remote_device
from torchrec.distributed import model_parallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.models import Model, Spec, is_dense, sharding_of


def _without_assertions(cls: type) -> Callable[..., None]:
    """Return the constructor of a class, compiled without its assert statements."""
    source = textwrap.indent(textwrap.dedent(inspect.getsource(cls.__init__)), "    ")
    # super() without arguments finds its class in a variable of the enclosing scope.
    source = f"def make(__class__):\n{source}\n    return __init__"
    code = compile(source, "<cpu>", "exec", optimize=1, dont_inherit=True)
    scope: dict[str, Any] = {}
    exec(code, vars(model_parallel), scope)
    return scope["make"](cls)


class Replicated(DMPCollection):
    """DMPCollection that averages as NCCL does, because gloo has no average: each rank scales, then all add."""

    __init__ = _without_assertions(DMPCollection)

    def _remap_sharding_plan(self, plan: ShardingPlan, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan=plan, **kwargs)
        for sharding in (each for module in plan.plan.values() for each in module.values()):
            for part in sharding.sharding_spec.shards if sharding.sharding_spec is not None else ():
                part.placement = _remote_device(f"rank:{part.placement.rank()}/cpu")  # a CPU has no index

    def _allreduce_tensors(self, *args: Any, **kwargs: Any) -> None:
        if self._custom_all_reduce is not None:
            super()._allreduce_tensors(*args, **kwargs)
            return
        # The first argument is a context, since torchrec 1.4 a group, and missing in 1.3.
        group = getattr(args[0], "replica_pg", args[0]) if len(args) > 3 else self._replica_pg
        for tensors in next(each for each in args if isinstance(each, dict)).values():
            for tensor in tensors:
                tensor.data.mul_(1 / group.size())
                # As those of NCCL, writes do not count in _version; those of the groups of torch.testing would.
                dist.all_reduce(tensor.data, group=group)


def replicate(spec: Spec, num_replicas: int, *, seed: int | None = None, **kwargs: Any) -> Replicated:
    """Build the model of ``spec`` on all ranks as ``num_replicas`` replicas, each sharded over an equal group of ranks.

    Args:
        spec: the model; the ranks in its shardings are those of one group.
        num_replicas: a divisor of the world size.
        seed: seed of the rows; by default another one on each rank, so that the replicas differ.
        kwargs: further arguments of the DMPCollection.
    """
    world_size = dist.get_world_size()
    group_size = world_size // num_replicas
    model = Model(spec, "meta")
    torch.manual_seed(0)
    model.dense = nn.Linear(spec.tables[0].dim, 1)
    optimizer = {"SGD": torch.optim.SGD}.get(spec.optimizer) or getattr(torchrec.optim, spec.optimizer)
    parameters = dict(model.ec.named_parameters())
    for table in spec.tables:
        if not is_dense(spec, table):
            weight = parameters[f"{'embedding_bags' if spec.bag else 'embeddings'}.{table.name}.weight"]
            apply_optimizer_in_backward(optimizer, [weight], {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder() if spec.bag else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ec,
        {table.name: sharding_of(table, table.kernel or spec.kernel) for table in spec.tables},
        sharder=sharder,
        local_size=group_size,
        world_size=group_size,
        device_type="cpu",
    )
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return Replicated(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ec": plan}),
        world_size=world_size,
        sharding_group_size=group_size,
        global_pg=dist.group.WORLD,
        node_group_size=group_size,
        sharders=[sharder],
        **kwargs,
    )
