"""Cases of hooks that fail on sharded models; each runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from delta_tracker import ModelDeltaTracker
from tests.models import Spec, Table, batch, kernels_of, ordinary_optimizer, shard
from tests.sharding.hook_faults import Faults, Training, fail_at_every_line, fail_at_every_point
from tests.sharding.replicated import replicate

_ROWS = 64


def _spec(bag: bool) -> Spec:
    return Spec([Table("a", _ROWS, "row"), Table("b", _ROWS, "table:0")], bag=bag)


def _node_of(output: torch.Tensor) -> Any:
    """Return the autograd node of a kernel's lookup."""
    node: Any = output.grad_fn
    while "LookupFunction" not in node.name():
        node = node.next_functions[0][0]
    return node


class _Fused(Training):
    """Training of tables with a fused optimizer."""

    def __init__(self, bag: bool, **kwargs: Any) -> None:
        self.spec = _spec(bag)
        self.model = shard(self.spec)
        super().__init__(ModelDeltaTracker(self.model, **kwargs))
        for kernel in kernels_of(self.model.module.ec):
            # Around the tracker's hooks of the node: it calls its pre-hooks, and its hooks, in their order.
            kernel.register_forward_hook(self._watch_end, prepend=True)
            kernel.register_forward_hook(self._watch_start)

    def _watch_start(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        _node_of(output).register_prehook(self.writing)

    def _watch_end(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        _node_of(output).register_hook(self.written)

    def step(self, number: int) -> None:
        self.model(batch(self.spec, torch.Generator().manual_seed(number))).backward()


class _Compared(Training):
    """Training of tables without a fused optimizer."""

    def __init__(self, sharding: str, kernel: str, **kwargs: Any) -> None:
        self.spec = Spec([Table("a", _ROWS, sharding), Table("b", _ROWS, sharding)], bag=True, kernel=kernel)
        self.model = shard(self.spec)
        self.optimizer = ordinary_optimizer(self.model, "SGD", lr=0.1)
        super().__init__(ModelDeltaTracker(self.model, **kwargs))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch(self.spec, torch.Generator().manual_seed(number))).backward()
        self.optimizer.step()


class _Loaded(Training):
    """Loads of other weights."""

    most_rows = _ROWS

    def __init__(self, bag: bool, **kwargs: Any) -> None:
        self.model = shard(_spec(bag))
        super().__init__(ModelDeltaTracker(self.model, **kwargs))

    def step(self, number: int) -> None:
        state = self.model.state_dict()
        for value in state.values():
            for shards in value.local_shards() if hasattr(value, "local_shards") else ():
                shards.tensor.data.add_(number + 1)  # without a new version
        self.model.load_state_dict(state)


class _Evicting(Training):
    """Training of tables with managed collisions, which evict ids in each second batch."""

    most_rows = 16

    def __init__(self, **kwargs: Any) -> None:
        from tests.tracker.collision_cases import shard_collision  # noqa: PLC0415  it imports a lot

        self.model = shard_collision(1)
        evicting = self.model.module.mc
        super().__init__(ModelDeltaTracker(self.model, **kwargs))
        held = evicting._evict._method

        def evict(evicted: object) -> None:
            self.writing()
            held(evicted)
            self.written()

        evicting._evict._method = evict

    def step(self, number: int) -> None:
        from tests.tracker.collision_cases import collision_batch  # noqa: PLC0415

        self.model(collision_batch(torch.Generator().manual_seed(number))).backward()


def fused(rank: int, world_size: int, bag: bool, whens: list[str], stride: int, **kwargs: Any) -> dict[str, int]:
    """Let hooks of lookups fail."""
    return fail_at_every_point(_Fused(bag, **kwargs), whens, stride)


def lines(rank: int, world_size: int, kind: str, stride: int, **kwargs: Any) -> dict[str, int]:
    """Let each line of hooks of lookups and evictions fail once."""
    return fail_at_every_line(_Fused(bag=True, **kwargs) if kind == "fused" else _Evicting(**kwargs), stride)


def compared(rank: int, world_size: int, sharding: str, kernel: str, stride: int, **kwargs: Any) -> dict[str, int]:
    """Let hooks of lookups fail in tables that are compared with a copy."""
    return fail_at_every_point(_Compared(sharding, kernel, **kwargs), ["no read"], stride)


def loaded(rank: int, world_size: int, bag: bool, stride: int, **kwargs: Any) -> dict[str, int]:
    """Let hooks of loads fail."""
    return fail_at_every_point(_Loaded(bag, **kwargs), ["no read"], stride)


def evicting(rank: int, world_size: int, whens: list[str], stride: int, **kwargs: Any) -> dict[str, int]:
    """Let hooks of lookups and evictions fail."""
    return fail_at_every_point(_Evicting(**kwargs), whens, stride)


class _Synced(Training):
    """Training and averaging of replicas."""

    most_rows = 16  # of both replicas

    def __init__(self, **kwargs: Any) -> None:
        self.spec = Spec([Table("a", _ROWS, "table:0"), Table("b", _ROWS, "row")])
        self.model = replicate(self.spec, dist.get_world_size())
        super().__init__(ModelDeltaTracker(self.model, **kwargs))
        self.model.sync()
        self.copy.read()

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        self.model(batch(self.spec, generator)).backward()
        self.model.sync()


def synced(rank: int, world_size: int, stride: int, **kwargs: Any) -> dict[str, int]:
    """Let hooks of ``sync`` fail on the first rank."""
    training = _Synced(**kwargs)
    num_failed = number = 0
    for for_ever in (False, True):
        first = 0
        while True:
            faults = Faults(first if rank == 0 else None, for_ever=for_ever)
            training.failing_step(number, faults, "no read")
            num_points = torch.tensor(faults.num_points)
            dist.broadcast(num_points, 0)
            if num_points <= first:
                break
            num_failed, number, first = num_failed + 1, number + 3, first + stride
    return {"failed": num_failed, "errors": training.tracker.num_hook_errors}
