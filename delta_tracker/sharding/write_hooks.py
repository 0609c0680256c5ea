"""Hooks for writes outside autograd: ``load_state_dict``, and evictions of managed-collision modules.

The hook on a collection's ``load_state_dict`` also runs if ``load_state_dict`` is called on a module above it or by
``torch.distributed.checkpoint``. In-place writes that bypass ``load_state_dict`` are detected by
:class:`~delta_tracker.sharding.weights.WriteWatch`.

A managed-collision module resets the rows of evicted ids in its forward pass, before they are looked up again. TorchRec
has no hook there, so the module's ``_evict`` method is wrapped, once for all trackers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.kernel_hooks import UpdateListener, Watcher
from delta_tracker.sharding.torchrec_api import kernels_of, share_rows

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

# Table name to [N] local ids; None if no id is evicted.
_Evicted = Mapping[str, Tensor | None]


class LoadHook(Watcher):
    """Hook that reports all rows of one sharded collection as changed after each call of its ``load_state_dict``.

    Args:
        module: the collection.
        tables: FQNs of the tables to report.
        listener, keys, recorder: those of :class:`Watcher`.
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[str],
        listener: UpdateListener,
        keys: itertools.count[int],
        recorder: Recorder,
    ) -> None:
        super().__init__(tables, listener, keys, recorder)
        self._module = module
        # A deep copy of the module shares a function, and would copy a bound method with the listener.
        self._handle: RemovableHandle = module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, keys: self._after_load(module, keys)  # noqa: PLW0108
        )

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        super().remove()

    def _after_load(self, module: nn.Module, keys: object) -> None:
        del keys
        if module is not self._module and not self._contained(lambda: self._shares_rows(module), otherwise=True):
            return  # a copy of the model
        for fqn in self._tables:
            self._contained(partial(self._listener.mark, fqn, None, is_written=True), otherwise=None)
        self._contained(partial(self._listener.acknowledge_writes, self._tables), otherwise=None)

    def _shares_rows(self, copied: nn.Module) -> bool:
        """Return True if a copy of the collection has rows in the collection's memory."""
        pairs = zip(kernels_of(copied), kernels_of(self._module), strict=False)
        return any(share_rows(mine, its) for mine, its in pairs)


class EvictionHook(Watcher):
    """Hook that reports the rows that one managed-collision module resets when it evicts ids.

    Args:
        module: the sharded managed-collision module.
        tables: FQNs of the tables to report.
        listener, keys, recorder: those of :class:`Watcher`.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401  a class of torchrec's
        tables: Sequence[str],
        listener: UpdateListener,
        keys: itertools.count[int],
        recorder: Recorder,
    ) -> None:
        super().__init__(tables, listener, keys, recorder)
        self._module = module
        if not isinstance(module._evict, _Evictions):  # noqa: SLF001
            module._evict = _Evictions(module._evict)  # noqa: SLF001
        self._evictions: _Evictions = module._evict  # noqa: SLF001
        self._evictions.hooks.append(self)

    def remove(self) -> None:
        """Remove the hook. Removing the last hook of a module restores the module's ``_evict``."""
        super().remove()
        if self in self._evictions.hooks:
            self._evictions.hooks.remove(self)
        if not self._evictions.hooks and self._module.__dict__.get("_evict") is self._evictions:
            del self._module._evict  # noqa: SLF001

    def before(self, evicted: _Evicted) -> Callable[[], object]:
        """Report rows that are about to be reset, and return a function that the caller must call after the reset.

        Args:
            evicted: table name to ``[N]`` local ids; None if no id is evicted.
        """
        missed: Callable[[], object] = self._missed
        return self._contained(lambda: self._before(evicted), otherwise=missed)

    def _before(self, evicted: _Evicted) -> Callable[[], object]:
        key = next(self._keys)
        ids = self._contained(lambda: self._ids_by_table(evicted), otherwise=self._all_rows())
        self._contained(lambda: self._listener.notice_writes(self._tables), otherwise=None)
        self._begin_write(key, ids)

        def done() -> None:
            self._end_write(key, ids)
            self._listener.acknowledge_writes(self._tables)  # the tables of a kernel share a version counter

        return partial(self._contained, done, otherwise=None)

    def _missed(self) -> None:
        """Mark all rows after an eviction whose start could not be reported."""
        self._listener.mark_all_later(self._tables)

    def _ids_by_table(self, evicted: _Evicted) -> dict[str, Tensor | None]:
        by_table = {fqn: evicted.get(fqn.rpartition(".")[2]) for fqn in self._tables}
        return {fqn: ids for fqn, ids in by_table.items() if ids is not None}


class _Evictions:
    """Wrapper that replaces a module's ``_evict`` and calls the registered hooks before and after each eviction."""

    def __init__(self, evict: Callable[[_Evicted], None]) -> None:
        self._evict = evict
        self.hooks: list[EvictionHook] = []

    def __call__(self, evicted: _Evicted) -> None:
        with ExitStack() as ends:  # even after an error, because nothing more is written then
            for hook in tuple(self.hooks):
                ends.callback(hook.before(evicted))
            self._evict(evicted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[_Evicted], None]:
        """Return the ``_evict`` of the copied module, without hooks."""
        return copy.deepcopy(self._evict, memo)


def watch_writes(
    model: nn.Module, found: Discovery, listener: UpdateListener, keys: itertools.count[int], recorder: Recorder
) -> Iterator[Watcher]:
    """Register hooks for all writes to tracked tables outside autograd, and yield each of them.

    Tables without a fused optimizer get no hooks, because they are compared with a copy.
    """
    tables_of: dict[nn.Module, list[str]] = {}
    for module_fqn, module in found.modules.items():
        prefix = f"{module_fqn}." if module_fqn else ""
        tables_of[module] = [fqn for fqn, shard in found.shards.items() if fqn.startswith(prefix) and shard.is_fused]
        yield LoadHook(module, tables_of[module], listener, keys, recorder)
    for module in model.modules():
        inner = getattr(module, "_embedding_module", None)
        if isinstance(inner, nn.Module) and inner in tables_of and callable(getattr(module, "_evict", None)):
            yield EvictionHook(module, tables_of[inner], listener, keys, recorder)
