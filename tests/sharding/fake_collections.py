"""Sharded collections of one table for TorchRec's pipelines on simulated streams.

The kernel is :class:`CachedKernel`. There is one rank, so that nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.streamable import Pipelineable

from tests.fake_streams.cached_kernel import CachedKernel

Written = Callable[[list[int]], None]
"""Function that is called with the ids of each update when it is launched."""


class Ids(Pipelineable):
    """Batch of one feature: ``ids`` on a device, and the same numbers as ``on_host``."""

    def __init__(self, ids: Tensor, on_host: list[int]) -> None:
        self._ids, self.on_host = ids, on_host

    @staticmethod
    def of(on_host: list[int]) -> Ids:
        """Return a batch in pinned memory."""
        return Ids(torch.tensor(on_host, dtype=torch.int64).pin_memory(), on_host)

    def to(self, device: Any, non_blocking: bool = False) -> Ids:
        return Ids(self._ids.to(device, non_blocking=non_blocking), self.on_host)

    def clone(self) -> Ids:
        return Ids(self._ids.clone(), self.on_host)

    def part(self, places: list[int]) -> Ids:
        """Return the ids at some places of the batch."""
        return Ids(self._ids.index_select(0, on_device(places)), [self.on_host[each] for each in places])

    def sync(self) -> None:
        """Do nothing: the lengths are known."""

    def record_stream(self, stream: Any) -> None:
        self._ids.record_stream(stream)

    def values(self) -> Tensor:
        return self._ids

    def length_per_key(self) -> list[int]:
        return [len(self.on_host)]


def on_device(numbers: list[int]) -> Tensor:
    """Return int64 numbers on the device without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True)


class _LookupFunction(torch.autograd.Function):
    """Lookup, and an update of the rows in the backward pass: ``row -= gradient``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kernel: CachedKernel, ids: Ids, written: Written) -> Any:
        ctx.kernel, ctx.ids, ctx.written = kernel, ids, written
        return kernel.lookup(ids.values())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.written(ctx.ids.on_host)
        ids = ctx.ids.values()
        ctx.kernel.backward(ids, ctx.kernel.lookup(ids) - gradient)
        return None, None, None, None


class Lookups(nn.Module):
    """TorchRec's module around a kernel. Autograd runs its node, with all hooks, on the stream of the forward pass."""

    def __init__(self, kernel: CachedKernel, written: Written) -> None:
        super().__init__()
        self.emb_module, self._written = kernel, written
        self.flush, self.split_embedding_weights = kernel.flush, kernel.split_embedding_weights
        self._outside: list[Any] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, features: Ids) -> Tensor:
        if self.emb_module.prefetch_stream is None:
            self.emb_module.prefetch(features.values())
        found = _LookupFunction.apply(self._anchor, self.emb_module, features, self._written)
        if found.grad_fn is None:
            return found
        own = torch.cuda.current_stream()

        def enter(gradients: Any) -> None:
            own.wait_stream(torch.cuda.current_stream())
            gradients[0].record_stream(own)
            self._outside.append(torch.cuda.current_stream())
            torch.cuda.set_stream(own)

        found.grad_fn.register_prehook(enter)
        return found

    def leave(self, *_: Any) -> None:
        """End the autograd node of a lookup, after the hooks of the library."""
        torch.cuda.set_stream(self._outside.pop())


class _Output(LazyAwaitable[KeyedTensor]):
    """Rows of a table-wise table, with the tensor at which a pipeline may call a function in the backward pass."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        request: Any = Request(None, rows.device)  # type: ignore[arg-type]
        self._rows = request.dummy_tensor = rows
        self._awaitables = [SimpleNamespace(_tensor_awaitable=request)]
        self._sharding_types = ["table_wise"]

    def _wait_impl(self) -> KeyedTensor:
        return KeyedTensor(["t"], [2], self._rows)


class Collection(ShardedModule):  # type: ignore[type-arg]
    def __init__(self, lookups: Lookups) -> None:
        ShardedModule.__init__(self)
        self.lookups = lookups

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return nn.Module

    def create_context(self) -> Any:
        return EmbeddingBagCollectionContext()

    def input_dist(self, ctx: Any, features: Ids) -> Any:  # type: ignore[override]
        return KJTListSplitsAwaitable([NoWait(NoWait(features.clone()))], ctx)

    def prefetch(self, dist_input: Any, forward_stream: Any = None, ctx: Any = None) -> None:
        self.lookups.emb_module.prefetch(dist_input[0].values(), forward_stream)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        found = self.lookups(dist_input[0])
        found.grad_fn.register_hook(self.lookups.leave)
        return found

    def output_dist(self, ctx: Any, output: Any) -> Any:
        return _Output(output)


def _ahead(lookups: Lookups) -> Any:
    """Return a collection whose rows are looked up, and written, in two parts: also in the other batch, and not."""
    pec = import_module("torchrec.distributed.pec_embedding")

    class Ahead(Collection, pec.ShardedPECEmbeddingCollection):  # type: ignore[misc,name-defined]
        def create_context(self) -> Any:
            return pec.PECEmbeddingCollectionContext()

        def overlap_dist(self, ctx: Any, dist_input: Any, prev_ctx: Any, prev_dist_input: Any) -> Any:
            now, before = (None if each is None else each[0] for each in (dist_input, prev_dist_input))
            return [NoWait((_divided(now, before), None if before is None else _divided(before, now or before)))]

        def compute_and_output_dist_in_partition(
            self, ctx: Any, features: Any, splits: Any, is_overlapped: bool
        ) -> Any:
            with torch.no_grad():
                return [NoWait(self.lookups(each)) for each in features]

        def merge_partitioned_embeddings(
            self, ctx: Any, overlapped: Any, others: Any, forward_ctxs: Any, backward_ctxs: Any = None
        ) -> Any:
            rows = torch.cat([overlapped[0].wait(), others[0].wait()]).index_select(0, forward_ctxs[0].permute)
            ctx.rows, ctx.parts = rows.requires_grad_(), backward_ctxs[0]
            return LazyNoWait(KeyedTensor(["t"], [2], ctx.rows))

        def grad_dist(self, ctx: Any, backward_features: Any, is_overlapped: bool) -> Any:
            places = ctx.parts.ol_permute if is_overlapped else ctx.parts.nol_permute
            return [_Update(self.lookups, backward_features[0], ctx.rows.grad.index_select(0, places))]

    return Ahead(lookups)


class _Update(Awaitable[None]):
    """Update of rows with their gradient, in a second lookup."""

    def __init__(self, lookups: Lookups, features: Ids, gradient: Tensor) -> None:
        super().__init__()
        self._lookups, self._features, self._gradient = lookups, features, gradient

    def _wait_impl(self) -> None:
        found = self._lookups(self._features)
        found.grad_fn.register_hook(self._lookups.leave)
        found.backward(self._gradient)


def _divided(features: Ids | None, other: Ids | None) -> Any:
    """Return the parts of a batch with the ids that are and are not in another batch, as TorchRec's contexts do."""
    if features is None:
        return None
    seen = set() if other is None else set(other.on_host)
    places: tuple[list[int], list[int]] = ([], [])
    for place, row in enumerate(features.on_host):
        places[row not in seen].append(place)
    merged = places[0] + places[1]
    return SimpleNamespace(
        splits=None,
        permute=on_device([merged.index(place) for place in range(len(merged))]),
        ol_permute=on_device(places[0]),
        nol_permute=on_device(places[1]),
        ol_features=features.part(places[0]),
        nol_features=features.part(places[1]),
    )


class OneTable(nn.Module):
    """Model with one collection; its loss is the sum of the rows.

    Args:
        is_ahead: for a pipeline that looks up the rows of the next batch that this batch does not change.
    """

    def __init__(self, lookups: Lookups, *, is_ahead: bool = False) -> None:
        super().__init__()
        self.ec = _ahead(lookups) if is_ahead else Collection(lookups)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        loss = self.ec(features).values().sum()
        return loss, loss.detach()
