"""Stand-in for TorchRec's sharded collections, made of plain torch, for machines without torchrec and fbgemm.

A collection has one table-batched kernel with the interface of FBGEMM's: one flat weight tensor, one autograd node with
a name like that of FBGEMM's node, and an optimizer that writes rows inside the backward pass. The update of a row
depends only on the row, so that results have the same bits on every device and for ids in any order. Inside
:func:`installed`, the library finds these classes instead of torchrec's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class Features:
    """Ids of one batch, with the methods of TorchRec's KeyedJaggedTensor that the tracker uses.

    Args:
        ids: feature name to ``[N]`` int64 ids.
    """

    def __init__(self, ids: Mapping[str, Tensor]) -> None:
        self._keys = list(ids)
        self._lengths = [len(each) for each in ids.values()]
        self._values = torch.cat(list(ids.values()))

    def keys(self) -> list[str]:
        """Return the feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Return the ids of all features in order."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the number of ids of each feature."""
        return self._lengths


class SplitLookupFunction_plain_Op(torch.autograd.Function):  # noqa: N801  named like FBGEMM's nodes
    """Lookup of one row for each id. Its backward pass updates these rows and ignores the gradient."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, tables: list[Tensor], ids: list[Tensor]) -> Tensor:  # noqa: ANN401
        """Return the rows ``[N]``, flattened, of all tables.

        Args:
            ctx: keeps the arguments for the backward pass.
            trigger: a parameter, so that the output requires a gradient.
            tables: rows of each table, ``[R, D]``.
            ids: ids of each table, ``[N]``.
        """
        del trigger
        ctx.tables, ctx.ids = tables, ids
        return torch.cat([table.index_select(0, each).flatten() for table, each in zip(tables, ids, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Multiply each looked-up row by 0.75 and add 0.125, once, even if an id occurs several times."""
        for table, ids in zip(ctx.tables, ctx.ids, strict=True):
            rows = table.index_select(0, ids).mul_(0.75).add_(0.125)
            table.data.index_copy_(0, ids, rows)  # .data: FBGEMM's kernels do not count a write either
        return grads[0].new_zeros(()), None, None


class _Tbe(nn.Module):
    """Memory of all tables of a kernel."""

    optimizer = SimpleNamespace(name="EXACT_SGD")

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shapes = shapes
        size = sum(rows * dim for rows, dim in shapes)
        self.weights_dev: Tensor
        self.register_buffer("weights_dev", torch.empty(size, device=device, dtype=dtype))

    def split_embedding_weights(self) -> list[Tensor]:
        """Return views of the rows of each table."""
        flat = self.weights_dev.detach().split_with_sizes([rows * dim for rows, dim in self.shapes])
        return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

    def split_optimizer_states(self) -> list[Any]:
        """Return an empty list: the optimizer has no states."""
        return []


class _Kernel(nn.Module):
    """Kernel of several tables, as TorchRec wraps FBGEMM's."""

    def __init__(self, tables: Mapping[str, tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.emb_module = _Tbe(list(tables.values()), device, dtype)
        self.trigger = nn.Parameter(torch.zeros((), device=device))
        self.config = SimpleNamespace(
            embedding_tables=[
                SimpleNamespace(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    local_metadata=None,
                    compute_kernel=SimpleNamespace(value="fused"),
                    num_features=lambda: 1,
                )
                for name, (rows, dim) in tables.items()
            ]
        )

    def forward(self, features: Features) -> Tensor:
        """Return the looked-up rows, flattened."""
        ids = list(features.values().split_with_sizes(features.length_per_key()))
        found: Tensor = SplitLookupFunction_plain_Op.apply(  # type: ignore[no-untyped-call]
            self.trigger, self.split_embedding_weights(), ids
        )
        return found

    def split_embedding_weights(self) -> list[Tensor]:
        """Return views of the rows of each table."""
        return self.emb_module.split_embedding_weights()

    def flush(self) -> None:
        """Do nothing: there is no cache."""


class _Lookup(nn.Module):
    """Lookup of a collection on this rank."""

    def __init__(self, kernel: _Kernel) -> None:
        super().__init__()
        self._emb_modules = nn.ModuleList([kernel])


class _ShardedModule(nn.Module):
    """Base class of sharded modules."""


class _ShardedEmbeddingCollection(_ShardedModule):
    """Collection of which this process has all rows."""

    def __init__(self, tables: Mapping[str, tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.kernel = _Kernel(tables, device, dtype)
        self._lookups = [_Lookup(self.kernel)]
        self._output_dists: list[nn.Module] = []
        configs = self.kernel.config.embedding_tables
        self._table_name_to_config = {
            each.name: SimpleNamespace(
                num_embeddings=each.num_embeddings,
                embedding_dim=each.embedding_dim,
                feature_names=[each.name],
                data_type=SimpleNamespace(name=_NAMES[dtype]),
            )
            for each in configs
        }
        self.module_sharding_plan = {
            each.name: SimpleNamespace(compute_kernel="fused", sharding_spec=None) for each in configs
        }
        group = SimpleNamespace(embedding_tables=configs, fused_params={"optimizer": _Tbe.optimizer})
        self._embedding_shardings = [SimpleNamespace(_grouped_embedding_configs_per_rank=[[group]])]

    def forward(self, features: Features) -> Tensor:
        """Return the looked-up rows, flattened."""
        found: Tensor = self.kernel(features)
        return found


class _ShardedEmbeddingBagCollection(_ShardedModule):
    """Class without instances."""


class _DistributedModelParallel(nn.Module):
    """Class without instances."""


class _ShardedTensor(Tensor):
    """Class without instances."""


class PlainModel(nn.Module):
    """Model whose ``ec`` is a collection of tables on one device. Build and track it inside :func:`installed`.

    Args:
        tables: name to number of rows and columns.
        device: device of the tables.
        dtype: dtype of the tables.
    """

    def __init__(
        self, tables: Mapping[str, tuple[int, int]], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.ec = _ShardedEmbeddingCollection(tables, device, dtype)
        self._fqns = [f"ec.embeddings.{name}" for name in tables]
        generator = torch.Generator(device).manual_seed(0)
        for table in self.weights().values():
            table.normal_(generator=generator)

    def weights(self) -> dict[str, Tensor]:
        """Return the live rows of each table by FQN."""
        return dict(zip(self._fqns, self.ec.kernel.split_embedding_weights(), strict=True))

    def forward(self, features: Features) -> Tensor:
        """Return the sum of the looked-up rows."""
        found: Tensor = self.ec(features)
        return found.float().sum()

    def train_on(self, ids: Mapping[str, Tensor]) -> None:
        """Train one batch of ids ``[N]`` for each table."""
        self(Features(ids)).backward()


@contextmanager
def installed() -> Iterator[None]:
    """Context manager in which the library finds the classes of this file instead of torchrec's."""
    prefix = "torchrec.distributed"
    found: dict[str, dict[str, type]] = {
        f"{prefix}.embedding": {"ShardedEmbeddingCollection": _ShardedEmbeddingCollection},
        f"{prefix}.embeddingbag": {"ShardedEmbeddingBagCollection": _ShardedEmbeddingBagCollection},
        f"{prefix}.model_parallel": {"DistributedModelParallel": _DistributedModelParallel},
        f"{prefix}.types": {"ShardedModule": _ShardedModule, "ShardedTensor": _ShardedTensor},
    }
    before = {name: sys.modules.get(name) for name in found}
    for name, classes in found.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(classes)
    try:
        yield
    finally:
        for name, held in before.items():
            if held is None:
                del sys.modules[name]
            else:
                sys.modules[name] = held
