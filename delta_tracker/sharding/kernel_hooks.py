"""The post-lookup hook: it runs after each kernel's lookup and watches for the update of the rows.

A fused optimizer writes rows inside the backward of the kernel's autograd node. So the node's pre-hook is the last
moment before the write, and its post-hook proves the write. A forward under ``no_grad`` has no node, an output that
is dropped never runs it, and a second backward runs both hooks again. A pass that raises between the two is over when
the autograd engine drops the callbacks that were queued for its end.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from delta_tracker.monitor.recorder import Recorder

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from delta_tracker.sharding.discover import Kernel

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Names of FBGEMM's autograd nodes: SplitLookupFunction_<optimizer>_Op, SplitNoBagLookupFunction_..., with suffixes.
_NODE_NAME = "LookupFunction"
# Between the lookup and the kernel's output TorchRec puts at most a cast and a view.
_MAX_DEPTH = 8


class KeyedIds(Protocol):
    """As much of TorchRec's KeyedJaggedTensor as the tracker needs: ids grouped by feature."""

    def keys(self) -> list[str]:
        """Feature names, which may repeat."""

    def values(self) -> Tensor:
        """``[N]`` ids, those of the first feature first."""

    def length_per_key(self) -> list[int]:
        """How many ids each feature has."""


class UpdateListener(Protocol):
    """Who is told of lookups and updates, from the thread that makes them. Must not wait for the device."""

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """The rows ``ids`` (table FQN to ``[N]`` local ids, None for all) were looked up."""

    def opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """The rows ``ids`` (table FQN to ``[N]`` local ids, None for all) are about to be written."""

    def applied(self, key: int, tables: Mapping[str, Tensor | None]) -> None:
        """The rows opened under ``key`` are written."""

    def ended(self, key: int) -> None:
        """Nothing writes the rows opened under ``key`` any more. Called from any thread; must not take a lock."""

    def mark(self, fqn: str, ids: Tensor | None, *, is_written: bool) -> None:
        """Rows of a table changed; with ``is_written`` nobody knows what they held before."""

    def output_launched(self) -> None:
        """A collection has launched its output distribution. Must not block."""

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Look for in-place writes to the weights of tables that nothing has reported."""

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """All in-place writes so far to the weights of tables were reported."""


class Watcher:
    """Base of all hooks. An exception never leaves one: it is logged once, counted, and costs precision, not rows.

    Args:
        tables: FQNs of the tables that it tells of.
        listener: who is told.
        keys: source of keys, shared by all hooks of a listener.
        recorder: records faults, and how long recording takes.
    """

    def __init__(
        self, tables: Sequence[str], listener: UpdateListener, keys: itertools.count[int], recorder: Recorder
    ) -> None:
        self._tables = tables
        self._listener = listener
        self._keys = keys
        self._faults = [recorder.hook_errors.cell(table=fqn) for fqn in dict.fromkeys(tables)]
        self._timer = recorder.record_seconds.timer()
        self.num_errors = 0

    def remove(self) -> None:
        """Stop watching; what is under way goes unseen."""
        self._listener = _Deaf()

    def _opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        def opened() -> bool:
            with self._timer():
                self._listener.opened(key, ids)
            return True

        if not self._contained(opened, otherwise=False):
            self._contained(lambda: self._listener.opened(key, self._all_rows()), otherwise=None)

    def _all_rows(self) -> dict[str, Tensor | None]:
        return dict.fromkeys(self._tables)

    def _contained(self, action: Callable[[], _T], *, otherwise: _T) -> _T:
        """The result of ``action``; ``otherwise`` if it raises: training must not feel the tracker's faults."""
        try:
            return action()
        except Exception:
            # Whatever it is, it is ours and must not reach the training step.
            self.num_errors += 1
            for cell in self._faults:
                cell.add(1)
            if self.num_errors == 1:
                _logger.exception("tracking of %s failed once; all its rows count as changed", list(self._tables))
            return otherwise


class PostLookupHook(Watcher):
    """Runs after each lookup of one kernel: watches for the update of its rows, and may report the lookup itself.

    It is a module hook, not TorchRec's post-lookup slot: a managed-collision module does not call that slot.

    Args:
        kernel: the kernel to watch.
        listener: receives the updates and lookups.
        keys: source of keys, shared by all hooks of a listener.
        recorder: records faults, lookups, and how long recording takes.
        lookups: report every lookup too, also those that update nothing.
    """

    def __init__(
        self,
        kernel: Kernel,
        listener: UpdateListener,
        keys: itertools.count[int],
        recorder: Recorder,
        *,
        lookups: bool,
    ) -> None:
        super().__init__([fqn for fqn, _ in kernel.slots if fqn is not None], listener, keys, recorder)
        self._kernel = kernel
        self._lookups = lookups
        # Lookups of tables that are compared are not looked at, so there is no number of them, not even 0.
        is_counted = kernel.is_fused or lookups
        self._counts = {fqn: recorder.lookups.cell(table=fqn) for fqn in self._tables if is_counted}
        self._unproven = next(keys)
        self._index_type = getattr(kernel.module, "_embedding_table_index_type", torch.int64)
        self._handle: RemovableHandle = kernel.module.register_forward_hook(self._post_lookup)

    def remove(self) -> None:
        """Stop watching; backward passes of lookups made before go unseen."""
        self._handle.remove()
        super().remove()

    def _post_lookup(self, module: object, args: tuple[Any, ...], output: Tensor) -> None:
        del module
        updates = output.requires_grad and self._kernel.is_fused
        if not updates and not self._lookups:
            return
        ids = self._contained(lambda: self._ids_by_table(args[0]), otherwise=self._all_rows())
        if self._lookups:
            self._count(ids)
            self._contained(lambda: self._listener.looked_up(ids), otherwise=None)
        if updates:
            self._watch_update(output, ids)

    def _watch_update(self, output: Tensor, ids: Mapping[str, Tensor | None]) -> None:
        node = self._contained(lambda: _lookup_node(output), otherwise=None)
        if node is None:
            # Nothing proves the write then: every row stays open, which costs bytes and loses nothing.
            output.register_hook(lambda _: self._opened(self._unproven, self._all_rows()))  # type: ignore[no-untyped-call]
            return
        open_keys: dict[int, int] = {}  # by thread: several may run a backward pass of one graph

        def before_write(grad_outputs: object) -> None:
            del grad_outputs
            if not self._lookups:
                self._count(ids)
            key = next(self._keys)
            open_keys[threading.get_ident()] = key
            self._opened(key, ids)
            self._contained(lambda: _end_with_backward(key, self._listener), otherwise=None)

        def after_write(grad_inputs: object, grad_outputs: object) -> None:
            del grad_inputs, grad_outputs
            key = open_keys.pop(threading.get_ident(), None)
            if key is not None:  # otherwise a pass inside this one was of the same graph; the end of the pass closes it
                self._contained(lambda: self._listener.applied(key, ids), otherwise=None)

        node.register_prehook(before_write)
        node.register_hook(after_write)

    def _count(self, ids: Mapping[str, Tensor | None]) -> None:
        for fqn, looked_up in ids.items():
            self._counts[fqn].add(0 if looked_up is None else looked_up.numel())

    def _ids_by_table(self, features: KeyedIds) -> dict[str, Tensor | None]:
        """The ids of each tracked table, by position: the features of slot 0 come first, then those of slot 1, ..."""
        values, lengths = features.values(), features.length_per_key()
        if values.dtype != self._index_type:
            # The kernel converts them in the forward. They may be written to before the backward.
            values = values.to(torch.int64, copy=True)
        ids: dict[str, Tensor | None] = {}
        feature, begin = 0, 0
        for fqn, num_features in self._kernel.slots:
            end = begin + sum(lengths[feature : feature + num_features])
            # Column shards of one table in one kernel look up the same ids: the first will do.
            if fqn is not None and fqn not in ids:
                ids[fqn] = values[begin:end]
            feature, begin = feature + num_features, end
        return ids


class _Deaf:
    """Listener of a removed hook."""

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """Ignore it."""

    def opened(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Ignore it."""

    def applied(self, key: int, tables: Mapping[str, Tensor | None]) -> None:
        """Ignore it."""

    def ended(self, key: int) -> None:
        """Ignore it."""

    def mark(self, fqn: str, ids: Tensor | None, *, is_written: bool) -> None:
        """Ignore it."""

    def output_launched(self) -> None:
        """Ignore it."""

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Ignore it."""

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """Ignore it."""


class _BackwardToken:
    """Report the end of a backward pass, which owns the only reference to this object.

    The autograd engine keeps the callbacks of a pass as long as a thread works on it. After an error it drops them
    without calling them, once the last of its threads has left the pass.
    """

    __slots__ = ("_key", "_listener")

    def __init__(self, key: int, listener: UpdateListener) -> None:
        self._key = key
        self._listener = listener

    def __call__(self) -> None:
        """Do nothing at the end of a pass that succeeded."""

    def __del__(self) -> None:
        self._listener.ended(self._key)


def _end_with_backward(key: int, listener: UpdateListener) -> None:
    """Call ``listener.ended(key)`` when the backward pass that runs in this thread has ended, also by an error."""
    torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001
        _BackwardToken(key, listener)
    )


def _lookup_node(output: Tensor) -> Node:
    """The autograd node whose backward writes the rows behind ``output``.

    Raises:
        LookupError: if there is none: this fbgemm is not built as the ones that are known.
    """
    node = output.grad_fn
    for _ in range(_MAX_DEPTH):
        if node is None:
            break
        if _NODE_NAME in node.name():
            return node
        node = next((upstream for upstream, _ in node.next_functions if upstream is not None), None)
    raise LookupError(f"no autograd node named *{_NODE_NAME}* behind the kernel's output")
