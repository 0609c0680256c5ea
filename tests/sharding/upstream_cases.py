"""Each class, kernel and optimizer of TorchRec and FBGEMM, as a tracker finds it; each case runs on every rank."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.sharding.discover import discover, has_unknown_rows
from delta_tracker.sharding.refusals import refuse_unseen_writes
from delta_tracker.sharding.torchrec_api import load_torchrec
from tests.models import Spec, Table, kernels_of, shard
from tests.sharding.upstream import INSIDE, MODULES, PRUNED, REFUSED, TRACKED, WITHOUT_ROWS, installed, module_of

_NAME = "model.ec.embedding_bags.t"


def modules(rank: int, world_size: int) -> dict[str, str]:
    """Return what becomes of each sharded module. Its constructor does not run; some get a collection inside."""
    del rank, world_size
    torchrec = load_torchrec()
    collection = shard(Spec([Table("t", 8, "row")], bag=True)).module.ec
    found = {}
    for name in MODULES.keys() & installed("sharded modules"):
        kind: Any = type(name, (getattr(import_module(module_of(name)), name),), {})
        kind.__abstractmethods__ = frozenset()
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        if torchrec.holder(module) is not None:
            found[name] = TRACKED
        elif isinstance(module, torchrec.without_rows):
            found[name] = WITHOUT_ROWS
        elif has_unknown_rows(module, torchrec):
            found[name] = REFUSED
            if MODULES[name] in (INSIDE, PRUNED):
                module.inside = collection
                found[name] = REFUSED if has_unknown_rows(module, torchrec) else MODULES[name]
    return found


def kernels(rank: int, world_size: int) -> dict[str, str]:
    """Return what becomes of a table with each kernel."""
    del rank, world_size
    found = {}
    for kernel in EmbeddingComputeKernel:
        model = shard(Spec([Table("t", 8, "row")], bag=True))
        for held in kernels_of(model.module.ec):
            held.config.embedding_tables[0].compute_kernel = kernel
        found[kernel.name] = _outcome(model)
    return found


def optimizers(rank: int, world_size: int) -> dict[str, str]:
    """Return what becomes of a table whose kernel has each fused optimizer."""
    del rank, world_size
    found = {}
    for optimizer in EmbOptimType:
        model = shard(Spec([Table("t", 8, "row")], bag=True))
        for held in kernels_of(model.module.ec):
            held.emb_module.optimizer = optimizer
        found[optimizer.name] = _outcome(model)
    return found


def _outcome(model: Any) -> str:
    try:
        refuse_unseen_writes(model, discover(model))
    except UnsupportedModelError as error:
        return REFUSED if "embedding_bags.t'" in str(error) else str(error)
    return TRACKED
