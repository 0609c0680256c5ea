"""Find the tables of a model that TorchRec has not sharded. They are ``nn.Embedding`` and ``nn.EmbeddingBag`` modules.

TorchRec's unsharded collections contain such modules. A table with dense gradients is compared with a copy, which
is exact for every optimizer. A table with sparse gradients needs no copy: :mod:`delta_tracker.sharding.step_hook`
reports the rows that an optimizer writes.

In a process group, all ranks must have the same rows. Only ``DistributedDataParallel`` ensures this.
"""

from collections.abc import Iterable, Iterator, Mapping
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from delta_tracker.errors import UnsupportedModelError
from delta_tracker.rows import take_rows
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.torchrec_api import Torchrec, is_fsdp2, managed_by_fsdp
from delta_tracker.types import TABLE_DTYPES, ShardSpec, TableSpec, dtype_name

PlainModule = nn.Embedding | nn.EmbeddingBag
_LOST = "a table that can no longer be tracked"
_REMEDY = "Name it in fqns_to_skip to train it untracked"
_META_REMEDY = (
    "Build the tracker after DistributedModelParallel or to_empty(device=...), or name it in fqns_to_skip to train it "
    "untracked"
)


class PlainTable:
    """Unsharded table of one ``nn.Embedding`` or ``nn.EmbeddingBag`` module. Its only slot is 0.

    Args:
        fqn: FQN of the table.
        module: module that contains the table.
        path: pairs of a module and a child name that lead from the model to ``module``.
    """

    is_fused = False

    def __init__(self, fqn: str, module: PlainModule, path: Iterable[tuple[nn.Module, str]]) -> None:
        self.module = module
        self._fqn = fqn
        self._path = tuple((parent, key, parent._modules[key]) for parent, key in path)  # noqa: SLF001
        self._modules = [module, *(parent for parent, _, _ in self._path)]
        self._kind = _kind(module.weight)
        self._weight = ref(module.weight)

    def check(self) -> None:
        """Raise UnsupportedModelError if the table can no longer be tracked.

        It cannot be tracked if its module was removed from the model, if the shape, dtype, device or class of its
        weight has changed, or if ``fully_shard`` manages the weight.
        """
        weight: Tensor | None = self.module._parameters.get("weight")  # noqa: SLF001
        now = "missing" if weight is None else _kind(weight)
        remedy = "Call tracker.reattach(), or build the tracker after the model is wrapped, sharded or converted"
        if any(parent._modules.get(key) is not child for parent, key, child in self._path):  # noqa: SLF001
            reason = "its module was replaced in the model"
        elif isinstance(weight, DTensor) or (weight is not self._weight() and any(map(is_fsdp2, self._modules))):
            reason = "its weight is now sharded by fully_shard or as another DTensor"
            remedy = "Detach the tracker. To track the table, pass its weight to fully_shard in ignored_params"
        elif now != self._kind:
            reason = f"its weight is now {now}, and was {self._kind} when the tracker was built"
        else:
            return
        raise UnsupportedModelError({self._fqn: reason}, remedy, problem=_LOST)

    def weight(self, slot: int) -> Tensor:  # noqa: ARG002
        """Return a detached view of the module's weight, ``[rows, columns]``."""
        return self.module.weight.detach()

    def memory(self, slot: int) -> Tensor | None:  # noqa: ARG002
        """Return a detached view of the module's weight; None if the weight is missing or not strided."""
        weight: Tensor | None = self.module._parameters.get("weight")  # noqa: SLF001
        return None if weight is None or weight.layout is not torch.strided else weight.detach()

    def rows(self, slot: int, ids: Tensor) -> Tensor:
        """Return a copy of the rows with local ids ``ids`` (``[N]`` int64) as an ``[N, columns]`` tensor."""
        return take_rows(self.weight(slot), ids)

    def optimizer_states(self, slot: int) -> list[Tensor]:  # noqa: ARG002
        """Return an empty list, because the optimizer is not fused."""
        return []

    def weight_slots(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return a list of one ``(mapping, key)`` pair; ``mapping[key]`` is the weight."""
        return [(self.module._parameters, "weight")]  # noqa: SLF001


def plain_shards(model: nn.Module, modules: Mapping[str, PlainModule], torchrec: Torchrec) -> dict[str, LocalShard]:
    """Return a shard for each of the embedding ``modules``, by FQN. A shard contains all rows of the table.

    Raises:
        UnsupportedModelError: if the model itself is an embedding module, so that the table has no name, or if the
            weight of a module is not an ordinary parameter with all rows on this rank, is not float32, float16 or
            bfloat16, or may differ between the ranks of the process group.
    """
    fsdp, replicated = managed_by_fsdp(model, torchrec), _replicated(model)
    paths = {id(module): name for name, module in model.named_modules()}
    found = {}
    for fqn, module in modules.items():
        if not fqn:
            raise UnsupportedModelError({fqn: "the model itself is the table"}, "Pass a model that contains it")
        weight = module._parameters.get("weight")  # noqa: SLF001  a parametrized weight is computed, not stored
        if reason := _obstacle(module, weight, fsdp, replicated):
            is_meta = weight is not None and weight.is_meta
            raise UnsupportedModelError({fqn: reason}, _META_REMEDY if is_meta else _REMEDY)
        assert weight is not None, "otherwise there is an obstacle"
        table = TableSpec(fqn, module.num_embeddings, module.embedding_dim, weight.dtype)
        spec = ShardSpec(table, 0, module.num_embeddings, ((0, module.embedding_dim),), is_replicated=True)
        # max_norm rescales rows in the forward pass, without a gradient and without an optimizer. Other processes may
        # train a table in shared memory.
        is_shared = weight.device.type == "cpu" and weight.is_shared()  # type: ignore[no-untyped-call]
        is_stepped = module.sparse and module.max_norm is None and not is_shared
        holder = PlainTable(fqn, module, _path(model, paths[id(module)]))
        found[fqn] = LocalShard(spec, ((holder, 0),), weight.device, is_fused=False, is_stepped=is_stepped)
    return found


def _path(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield pairs of a module and a child name that lead from ``model`` to its submodule ``name``."""
    for key in name.split("."):
        yield model, key
        model = model.get_submodule(key)


def _kind(weight: Tensor) -> str:
    """Return a text that describes the shape, dtype, device and class of a weight."""
    kind = "" if type(weight) is nn.Parameter else f", a {type(weight).__name__}"
    return f"{tuple(weight.shape)} {str(weight.dtype).removeprefix('torch.')} on {weight.device}{kind}"


def _obstacle(module: PlainModule, weight: Tensor | None, fsdp: set[int], replicated: set[int] | None) -> str | None:
    """Return the reason if a table cannot be tracked, otherwise None.

    ``fsdp`` contains the ``id()`` of each parameter that FSDP manages. ``replicated`` contains the ``id()`` of each
    parameter that is the same on every rank; None if there is only one rank.
    """
    shape = (module.num_embeddings, module.embedding_dim)
    if type(weight) is not nn.Parameter or weight.is_inference():
        kind = "missing" if weight is None else f"a {type(weight).__name__}"
        cause = "not an nn.Parameter, for example because it is parametrized"
        if weight is not None and weight.is_inference():
            kind, cause = "an inference tensor", "so that writes to it are not counted"
        return f"its weight is {kind}, {cause}"
    if id(weight) in fsdp:
        return "its weight is managed by FSDP, which may keep only a part of the rows on a rank"
    if weight.is_meta or tuple(weight.shape) != shape:
        place = " on the meta device" if weight.is_meta else ""
        return f"its weight has the shape {tuple(weight.shape)}{place}, not {shape} with values"
    if dtype_name(weight.dtype) not in TABLE_DTYPES:
        return f"its dtype is {weight.dtype}, not one of {[*TABLE_DTYPES]}"
    if replicated is not None and id(weight) not in replicated:
        return (
            f"its rows may differ between the {dist.get_world_size()} ranks. Wrap the model in "
            "DistributedDataParallel over all ranks, or shard it with DistributedModelParallel, and pass the wrapper"
        )
    return None


def _replicated(model: nn.Module) -> set[int] | None:
    """Return the ``id()`` of each parameter that DDP keeps the same on every rank; None if there is only one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return {
        id(parameter)
        for wrapper in model.modules()
        if isinstance(wrapper, DistributedDataParallel) and wrapper.process_group.size() == dist.get_world_size()
        for name, parameter in wrapper.module.named_parameters(remove_duplicate=False)
        if name not in wrapper.parameters_to_ignore
    }
