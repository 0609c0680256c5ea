"""Hook that reports the rows that a kernel looks up and updates.

A fused optimizer writes rows when the kernel's autograd node runs in the backward pass. The node's pre-hook therefore
runs just before the write, and its post-hook just after the write. A forward pass under ``no_grad`` creates no node,
the node of a discarded output never runs, and a second backward pass runs both hooks again. If a backward pass raises
between the two hooks, the autograd engine deletes a callback that was queued for it. The deletion ends the write.

The hooks run when a CUDA graph is captured, but not when it is replayed. Once a lookup or a backward pass of a table
has been captured, every read of changes returns all rows of the table. The same applies to lookups that are compiled
with ``fullgraph=True``.

A deep copy of a model also calls the hooks. The hooks ignore lookups of the copy, because it has its own rows.
TorchRec's ``DistributedModelParallel.copy()`` to the same device does not copy the rows: the hooks report lookups of
such a copy. They count the backward passes of other copies, so that a warning is issued if a job trains a copy.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from delta_tracker.sharding.kernel_memory import Kernel
from delta_tracker.sharding.named_writers import num_named_writes
from delta_tracker.sharding.torchrec_api import share_rows, weight_slots
from delta_tracker.sharding.watcher import HookContext, HookListener, OtherUpdates, Watcher, is_capturing, untraced

# Names of FBGEMM's autograd nodes: SplitLookupFunction_<optimizer>_Op, SplitNoBagLookupFunction_..., with suffixes.
_NODE_NAME = "LookupFunction"
# Prefix of the names of torch.compile's autograd nodes. One node has the backward pass of a whole compiled graph.
_COMPILED_NAME = "CompiledFunction"
# TorchRec inserts at most a cast and a view between the lookup and the kernel's output.
_MAX_DEPTH = 8


class KeyedIds(Protocol):
    """Methods of TorchRec's ``KeyedJaggedTensor`` that the tracker uses. Ids are grouped by feature."""

    def keys(self) -> list[str]:
        """Return the names of the features. A name may occur several times."""

    def values(self) -> Tensor:
        """Return the ids of all features, ``[N]``, in the order of :meth:`keys`."""

    def length_per_key(self) -> list[int]:
        """Return the number of ids of each feature, in the order of :meth:`keys`."""


class PostLookupHook(Watcher):
    """Hook that reports the rows that a kernel updates and, if ``lookups`` is True, the rows that it looks up.

    It is registered as a forward hook of the kernel's module. TorchRec's own callback after a lookup is not used,
    because managed-collision modules do not call it.

    Args:
        kernel: kernel whose lookups and updates are reported.
        context: objects that the tracker's hooks share.
        lookups: True to report every lookup, including lookups that update no row.

    Attributes:
        in_flight: updates whose backward pass has not begun, but whose autograd graph still exists.
        num_updates: number of backward passes that have begun to update rows.
        others: counter of backward passes through copies of the kernel that do not share its rows.
    """

    def __init__(self, kernel: Kernel, context: HookContext, *, lookups: bool) -> None:
        super().__init__([fqn for fqn, _ in kernel.slots if fqn is not None], context)
        self._kernel = kernel
        self._lookups = lookups
        self.in_flight: WeakSet[_Update] = WeakSet()
        self.num_updates = 0
        self.others = OtherUpdates(self._versions)
        # Lookups of tables that are compared with a copy are not counted, so these tables get no counter.
        is_counted = kernel.is_fused or lookups
        self._counts = {fqn: context.recorder.lookups.cell(table=fqn) for fqn in self._tables if is_counted}
        self._index_type = getattr(kernel.module, "_embedding_table_index_type", torch.int64)
        self._before_write = untraced(self._write_begins, self.omitted)
        self._after_write = untraced(self._write_ends, self.omitted)
        handle: RemovableHandle = kernel.module.register_forward_hook(untraced(self._post_lookup, self.omitted))
        self._removals.append(handle.remove)
        if kernel.has_cache:
            handle = kernel.module.register_forward_pre_hook(untraced(self._pre_lookup, self.omitted))
            self._removals.append(handle.remove)

    def _pre_lookup(self, module: object, args: tuple[Any, ...]) -> None:
        """Make the lookup wait for a read that flushes the cache on another stream. A lookup changes the cache."""
        del module, args
        if not is_capturing():
            self._contained(self._listener.order_lookup, otherwise=None)

    def _post_lookup(self, module: object, args: tuple[Any, ...], output: Tensor) -> None:
        original = self._kernel.module
        if module is not original and not self._contained(lambda: share_rows(module, original), otherwise=True):
            self._contained(lambda: self._watch_copy(output), otherwise=None)
            return
        updates = output.requires_grad and self._kernel.is_fused
        if not updates and not self._lookups:
            return
        is_reported = self._contained(lambda: self._report(args[0], output, updates=updates), otherwise=False)
        if updates and not is_reported:
            self._watch_output(output)

    def _watch_copy(self, output: Tensor) -> None:
        if output.requires_grad and self._kernel.is_fused and not is_capturing():
            output.register_hook(lambda _: self._contained(lambda: self.others.count(self._tables), otherwise=None))  # type: ignore[no-untyped-call]

    def _versions(self) -> list[int]:
        slots = weight_slots(self._kernel.module)
        return [owner[name]._version for owner, name in slots if owner[name] is not None] + [num_named_writes()]  # type: ignore[union-attr]  # noqa: SLF001

    def _report(self, features: KeyedIds, output: Tensor, *, updates: bool) -> bool:
        ids = self._all_rows()
        if not is_capturing():
            ids = self._contained(lambda: self._ids_by_table(features), otherwise=ids)
        if self._lookups:
            self._looked_up(ids)
        if updates:
            self._watch_update(output, ids)
        return True

    def _looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        if is_capturing():
            self._captured()
            return
        self._contained(lambda: self._listener.looked_up(ids), otherwise=None)
        self._contained(lambda: self._count(ids), otherwise=None)

    def _watch_update(self, output: Tensor, ids: Mapping[str, Tensor | None]) -> None:
        node = _lookup_node(output)
        update = _Update(ids, is_proven=_NODE_NAME in node.name())
        self.in_flight.add(update)
        node.register_prehook(partial(self._before_write, update))
        node.register_hook(partial(self._after_write, update))

    def _watch_output(self, output: Tensor) -> None:
        """Report all rows in each backward pass through ``output``, because the node that writes them is unknown."""

        def watch() -> bool:
            update = _Update(self._all_rows(), is_proven=False)
            self.in_flight.add(update)
            output.register_hook(partial(self._before_write, update))  # type: ignore[no-untyped-call]
            return True

        if not self._contained(watch, otherwise=False):
            self._unseen("a hook could not be registered; build a new tracker")

    def _write_begins(self, update: "_Update", grad_outputs: object) -> None:  # noqa: ARG002
        if not self._contained(partial(self._begin, update), otherwise=False):
            update.is_missed = True

    def _begin(self, update: "_Update") -> bool:
        key = next(self._keys)
        update.keys[threading.get_ident()] = key
        self.in_flight.discard(update)
        self.num_updates += 1
        self.others.clear()
        if not update.is_proven and not is_capturing():
            self._contained(lambda: self._listener.notice_writes(self._tables), otherwise=None)
        token = _BackwardToken(key, self._listener)  # first, so that a write that began always ends
        if not self._contained(lambda: _end_with_backward(token), otherwise=False):
            update.token = token  # it is deleted with the graph
        self._begin_write(key, update.ids)
        if not self._lookups:
            self._contained(lambda: self._count(update.ids), otherwise=None)
        return True

    def _write_ends(self, update: "_Update", grad_inputs: object, grad_outputs: object) -> None:  # noqa: ARG002
        self._contained(partial(self._end, update), otherwise=None)

    def _end(self, update: "_Update") -> None:
        key = update.keys.pop(threading.get_ident(), None)
        if update.is_missed:
            # Cuts since the start of the write have not marked the rows again.
            self._listener.mark_all_later(self._tables)
        elif not update.is_proven:
            # Compiled code increments the version of the weights. Another node may write the rows later in the pass.
            self._contained(lambda: self._listener.acknowledge_writes(self._tables), otherwise=None)
        if key is not None and update.is_proven:
            # None after a nested pass of the same graph; the end of the outer pass ends its write
            self._end_write(key, update.ids)

    def _count(self, ids: Mapping[str, Tensor | None]) -> None:
        for fqn, looked_up in ids.items():
            self._counts[fqn].add(0 if looked_up is None else looked_up.numel())

    def _ids_by_table(self, features: KeyedIds) -> dict[str, Tensor | None]:
        """Return the ids ``[N]`` of each tracked table, by FQN. Features are in the order of the kernel's slots."""
        values, lengths = features.values(), features.length_per_key()
        if values.dtype != self._index_type:
            # The kernel converts the ids in the forward pass. The originals may be overwritten before the backward.
            values = values.to(torch.int64, copy=True)
        ids: dict[str, Tensor | None] = {}
        sizes, feature = [], 0
        for _, num_features in self._kernel.slots:
            sizes.append(sum(lengths[feature : feature + num_features]))
            feature += num_features
        if (num_ids := sum(sizes)) != values.numel():  # padding at the end
            values = values[:num_ids]
        # One call for all tables, because a slice takes 3 us.
        for (fqn, _), own in zip(self._kernel.slots, values.split_with_sizes(sizes), strict=True):
            # Column shards of one table in one kernel look up the same ids, so use the first.
            if fqn is not None and fqn not in ids:
                ids[fqn] = own
        return ids


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Update:
    """Write to the rows of one lookup. Only the hooks of the lookup's autograd node refer to this object.

    Args:
        ids: table FQN to ``[N]`` local ids; None for all rows.
        is_proven: True if the write is complete when the node ends. False if the lookup was compiled or its node is
            unknown. In this case, the write ends with the backward pass.
        keys: key of the write by thread id. Several threads may run a backward pass of one graph.
        is_missed: True if a hook failed before it reported the start of the write.
        token: token whose deletion reports the end of the write; set only if the autograd engine could not store it.
    """

    ids: Mapping[str, Tensor | None]
    is_proven: bool
    keys: dict[int, int] = field(default_factory=dict)
    is_missed: bool = False
    token: "_BackwardToken | None" = None


class _BackwardToken:
    """Callback that reports the end of a backward pass when the callback is deleted.

    Only the autograd engine references the token. It deletes the token when no thread works on the pass any longer. If
    the pass fails, it deletes the token without calling it.
    """

    __slots__ = ("_key", "_listener")

    def __init__(self, key: int, listener: HookListener) -> None:
        self._key = key
        self._listener = listener

    def __call__(self) -> None:
        """Do nothing. The engine calls the token after a successful pass."""

    def __del__(self) -> None:
        self._listener.end_write_later(self._key)


def _end_with_backward(token: _BackwardToken) -> bool:
    """Make autograd delete ``token`` when this thread's backward pass ends, even after an error. Return True."""
    torch.autograd.Variable._execution_engine.queue_callback(token)  # noqa: SLF001
    return True


def _lookup_node(output: Tensor) -> Node:
    """Return the autograd node that updates the rows of the lookup that returned ``output``.

    If the lookup was compiled, return the compiled node that runs first. The rows are then written between the start of
    this node and the end of the pass. Raises LookupError if no node is found, as in unsupported fbgemm versions.
    """
    node, compiled = output.grad_fn, None
    for _ in range(_MAX_DEPTH):
        if node is None:
            break
        if _NODE_NAME in node.name():
            return node
        if compiled is None and node.name().startswith(_COMPILED_NAME):
            compiled = node
        node = next((upstream for upstream, _ in node.next_functions if upstream is not None), None)
    if compiled is not None:
        return compiled
    raise LookupError(f"the kernel's output has no autograd node named *{_NODE_NAME}*")
