"""Hooks on TorchRec's collections. They report output distributions, ``load_state_dict`` and evictions.

The hook on an output distribution runs while the communication that the distribution launched is in progress.

The hook on a collection's ``load_state_dict`` also runs if ``load_state_dict`` is called on a parent module or by
``torch.distributed.checkpoint``. :class:`~delta_tracker.sharding.weights.WriteWatch` detects in-place writes that
bypass ``load_state_dict``.

A managed-collision module resets the rows of evicted ids in its forward pass, before these rows are looked up again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.torchrec_api import kernels_of, share_rows
from delta_tracker.sharding.watcher import HookContext, Watcher, WrappedMethod, is_capturing, untraced

# Table name to [N] local ids; None if no id is evicted.
_Evicted = Mapping[str, Tensor | None]


class LaunchHook(Watcher):
    """Hook that reports each launch of an output distribution. A collection has one distribution per sharding type.

    It is registered as a forward hook of the distributions. TorchRec's own callback after an output distribution is
    not used: a module can have only one, and collections inside managed-collision modules do not call it.

    Args:
        module: sharded collection.
        tables: FQNs of the module's tables.
        context: objects that the tracker's hooks share, see :class:`Watcher`.
    """

    def __init__(self, module: Any, tables: Sequence[str], context: HookContext) -> None:  # noqa: ANN401  torchrec's
        super().__init__(tables, context)
        launched = untraced(self._report, lambda: None)  # without it, the next read compacts the log
        self._dists: tuple[Any, ...] = tuple(module._output_dists)  # noqa: SLF001
        self._removals = [dist.register_forward_hook(launched).remove for dist in self._dists]

    def _report(self, dist: object, *_: object) -> None:
        self._contained(lambda: self._output_launched(dist), otherwise=None)

    def _output_launched(self, dist: object) -> None:
        is_own = any(dist is each for each in self._dists)  # a copy of the collection has this hook, too
        if is_own and not is_capturing():
            self._listener.output_launched()


class LoadHook(Watcher):
    """Hook that reports all rows of one sharded collection as changed after each call of its ``load_state_dict``.

    The arguments are those of :class:`LaunchHook`.
    """

    def __init__(self, module: nn.Module, tables: Sequence[str], context: HookContext) -> None:
        super().__init__(tables, context)
        self._module = module
        # A deep copy of the module shares a function, and would copy a bound method with the listener.
        handle: RemovableHandle = module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, keys: self._after_load(module, keys)  # noqa: PLW0108
        )
        self._removals.append(handle.remove)

    def _after_load(self, module: nn.Module, keys: object) -> None:  # noqa: ARG002
        if module is not self._module and not self._contained(lambda: self._shares_rows(module), otherwise=True):
            return  # a copy of the model
        for fqn in self._tables:
            self._contained(partial(self._listener.mark, fqn, None, is_written=True), otherwise=None)
        self._contained(partial(self._listener.acknowledge_writes, self._tables), otherwise=None)

    def _shares_rows(self, copied: nn.Module) -> bool:
        """Return True if ``copied``, a copy of the collection, shares the memory of its rows with the collection."""
        pairs = zip(kernels_of(copied), kernels_of(self._module), strict=False)
        return any(share_rows(mine, its) for mine, its in pairs)


class EvictionHook(Watcher):
    """Hook that reports the rows that one managed-collision module resets when it evicts ids.

    Args:
        module: sharded managed-collision module.
        tables, context: see :class:`LaunchHook`.
    """

    def __init__(self, module: nn.Module, tables: Sequence[str], context: HookContext) -> None:
        super().__init__(tables, context)
        self._removals.append(WrappedMethod.add(self.before, module, "_evict"))

    def before(self, evicted: _Evicted) -> Callable[[bool], object]:
        """Report the rows that the module is about to reset. Return a function to call after the reset.

        ``evicted`` maps each table name to ``[N]`` local ids, or to None if no rows of the table are reset.
        """
        missed: Callable[[bool], object] = self._missed
        return self._contained(lambda: self._before(evicted), otherwise=missed)

    def _before(self, evicted: _Evicted) -> Callable[[bool], object]:
        key = next(self._keys)
        ids = self._contained(lambda: self._ids_by_table(evicted), otherwise=self._all_rows())
        self._contained(lambda: self._listener.notice_writes(self._tables), otherwise=None)
        self._begin_write(key, ids)

        def done() -> None:
            self._end_write(key, ids)
            self._listener.acknowledge_writes(self._tables)  # the tables of a kernel share a version counter

        return lambda _: self._contained(done, otherwise=None)

    def _missed(self, is_done: bool) -> None:  # noqa: ARG002, FBT001  the only argument
        """Mark all rows after an eviction whose start could not be reported."""
        self._listener.mark_all_later(self._tables)

    def _ids_by_table(self, evicted: _Evicted) -> dict[str, Tensor | None]:
        by_table = {fqn: evicted.get(fqn.rpartition(".")[2]) for fqn in self._tables}
        return {fqn: ids for fqn, ids in by_table.items() if ids is not None}


def watch_collections(model: nn.Module, found: Discovery, context: HookContext) -> Iterator[Watcher]:
    """Register the hooks defined in this file on each collection of a model. Yield each hook.

    Loads and evictions are reported only for tables that have a fused optimizer. The tracker finds changes of other
    tables by comparing them with a copy.
    """
    fused: dict[object, list[str]] = {}
    for fqn, module in found.modules.items():
        tables = found.tables_of(fqn)
        fused[module] = [table for table in tables if found.shards[table].is_fused]
        yield LaunchHook(module, tables, context)
        yield LoadHook(module, fused[module], context)
    for module in model.modules():
        inner = getattr(module, "_embedding_module", None)
        if isinstance(inner, nn.Module) and inner in fused and callable(getattr(module, "_evict", None)):
            yield EvictionHook(module, fused[inner], context)
