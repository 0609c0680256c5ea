"""Stand-ins for names that TorchRec's tests import, on a machine without two GPUs or without ``parameterized``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch as _torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as _EmbOptimType
from torch.distributed import _remote_device
from torchrec.distributed.planner import EmbeddingShardingPlanner as _Planner
from torchrec.distributed.types import ShardingPlan


class _Instead:
    """An object with other values of some attributes."""

    def __init__(self, real: object, **attributes: object) -> None:
        self._real = real
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


torch = _Instead(_torch, device=lambda _: _torch.device("cpu"), cuda=_Instead(_torch.cuda, device_count=lambda: 2))
"""torch with two GPUs, whose tensors are on the CPU."""

EmbOptimType = _Instead(_EmbOptimType, ADAM=_EmbOptimType.EXACT_ADAGRAD)
"""FBGEMM's optimizers, with Adagrad for Adam."""


class EmbeddingShardingPlanner(_Planner):
    """TorchRec's planner for GPUs, whose shards are placed on the CPU. It plans fewer shardings for CPUs."""

    def collective_plan(self, *args: Any) -> ShardingPlan:
        plan = super().collective_plan(*args)
        for sharding in (each for module in plan.plan.values() for each in module.values()):
            for shard in sharding.sharding_spec.shards:
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
        return plan


def _expand(cases: Sequence[tuple[Any, ...]]) -> Callable[[Callable[..., None]], None]:
    """Define a test for each case in the class that is being defined, with the names that ``parameterized`` gives."""
    names = sys._getframe(1).f_locals

    def define(test: Callable[..., None]) -> None:
        for index, case in enumerate(cases):
            names[f"{test.__name__}_{index}_{case[0]}"] = _with(test, case)

    return define


def _with(test: Callable[..., None], case: tuple[Any, ...]) -> Callable[..., None]:
    @wraps(test)
    def run(self: object) -> None:
        test(self, *case)

    return run


parameterized = SimpleNamespace(expand=_expand)
