"""Comparison of the post-lookup hook with a copy of all rows, for kernels that no model shards; see the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from itertools import pairwise
from multiprocessing import util
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.kernel_hooks import PostLookupHook
from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.watcher import HookContext
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.comparing.compared import Found
from tests.tracker.tracking_cases import differing


class _Lookup(NamedTuple):
    """Ids of a lookup by feature, as in TorchRec's KeyedJaggedTensor, and the lookup itself."""

    ids: Tensor
    lengths: list[int]
    look_up: Callable[[], Tensor]

    def keys(self) -> list[str]:
        return [str(number) for number in range(len(self.lengths))]

    def values(self) -> Tensor:
        return self.ids

    def length_per_key(self) -> list[int]:
        return self.lengths


class _Module(nn.Module):
    """Module around a kernel, as TorchRec has one."""

    def __init__(self, tbe: Any) -> None:
        super().__init__()
        self.__dict__["emb_module"] = tbe  # not a child, because the kernel refers to it
        self.flush, self.split_embedding_weights = tbe.flush, tbe.split_embedding_weights

    def forward(self, lookup: _Lookup) -> Tensor:
        return lookup.look_up()


class ComparedKernel:
    """Hook of one kernel, and the rows at its last read."""

    def __init__(self, tbe: Any) -> None:
        features: Sequence[int] = tbe.feature_table_map
        sizes = [len(weight) for weight in tbe.split_embedding_weights()]
        self._found = Found()
        self._names = [str(table) for table in range(len(sizes))]
        stores = {name: SegmentStore(size) for name, size in zip(self._names, sizes, strict=True)}
        self._log = ChangeLog(stores, ["read"], delete_on_read=True, max_bytes=None)
        slots = tuple((name, features.count(table)) for table, name in enumerate(self._names))
        self._module = _Module(tbe)
        self._kernel = Kernel(self._module, slots, is_fused=True)
        context = HookContext(self._log.writes, Recorder("tracker", self._log, monitor=Monitor()))
        self._hook = PostLookupHook(self._kernel, context, lookups=False)
        self._rows: list[Tensor] = []  # as of the first lookup, because tests fill tables before it
        self._found["tables"] = len(sizes)
        if list(features) != sorted(features):
            self._found["refused"] = "the features of a table are not next to each other"
        self._end = util.Finalize(self, self.end, exitpriority=100)

    def look_up(self, look_up: partial[Tensor]) -> Tensor:
        """Compare the rows, and then look rows up."""
        self.compare()
        given = signature(look_up.func).bind(*look_up.args, **look_up.keywords).arguments
        num_features, offsets = sum(number for _, number in self._kernel.slots), given["offsets"].cpu()
        sizes = given.get("batch_size_per_feature_per_rank")
        each = [(len(offsets) - 1) // num_features] * num_features if sizes is None else [sum(own) for own in sizes]
        ends = torch.tensor([0, *each]).cumsum(0)
        lengths = [last - first for first, last in pairwise(offsets[ends].tolist())]
        return self._module(_Lookup(given["indices"], lengths, look_up))

    @torch.no_grad()
    def compare(self) -> None:
        """Compare a read with the rows that differ from the copy."""
        if self._found["refused"]:
            return
        now, read = self._copy(), self._log.consumers.read("read")
        self._log.consumers.commit(read)
        for name, before, after in zip(self._names, self._rows or now, now, strict=True):
            self._found.compare(name, set(differing(before, after)), set(read.rows[name].ids.tolist()))
        self._found["reads"] += 1
        self._rows = now

    def end(self) -> None:
        """Compare for the last time, and write the result."""
        self.compare()
        self._hook.remove()
        self._found.write()

    def _copy(self) -> list[Tensor]:
        return [self._kernel.weight(slot).detach().cpu().clone() for slot in range(len(self._names))]
