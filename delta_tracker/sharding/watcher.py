"""Base class of the hooks, the interface to which they report, and helpers to wrap methods and bypass compilation."""

import copy
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from delta_tracker.monitor.recorder import Recorder

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

UNSEEN = -1
"""Key for :meth:`HookListener.mark_all_later`. It requests that all later cuts mark all rows."""


class HookListener(Protocol):
    """Interface that receives the reports of hooks.

    Hooks call the methods in the thread of the lookup or write. Only the last three methods, which concern ``sync`` in
    2D parallelism, may wait for the device. Calls of :meth:`begin_write`, :meth:`end_write` and :meth:`end_write_later`
    with the same key refer to the same write. A read returns the changes up to a point that is called a cut.
    """

    def order_lookup(self) -> None:
        """Make the current stream wait for earlier reads. Called before a lookup loads rows into a device cache."""

    def looked_up(self, ids: Mapping[str, Tensor | None]) -> None:
        """Handle a lookup of the rows ``ids``, which are ``[N]`` local ids by table FQN, or None for all rows."""

    def begin_write(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        """Handle the start of the write ``key`` to the rows ``ids``, see :meth:`looked_up`."""

    def end_write(self, key: int, tables: Mapping[str, Tensor | None]) -> None:
        """Handle the end of the write ``key`` to the tables that are keys of ``tables``. Its values are ignored."""

    def end_write_later(self, key: int) -> None:
        """Handle the end of the write ``key`` without acquiring a lock.

        Hooks call this method at the end of a backward pass, even after an error, and after an interrupted write. They
        may call it in any thread or in a destructor.
        """

    def mark(self, fqn: str, ids: Tensor | None, *, is_written: bool) -> None:
        """Mark rows of a table as changed.

        ``ids`` are ``[N]`` local ids; None for all rows. ``is_written`` is True if the rows may already have been
        overwritten, so that their old states are unknown.
        """

    def output_launched(self) -> None:
        """Handle the launch of a collection's output distribution. Must not block."""

    def mark_all_later(self, fqns: Collection[str], key: int | None = None) -> None:
        """Mark all rows of the tables ``fqns`` as changed at the next cut, with unknown old states.

        If ``key`` is the key of a write, also mark them at each cut during the write and at the first cut after the
        write. If ``key`` is :data:`UNSEEN`, mark them at all later cuts.

        The method must be lock-free and must not raise, allocate tensors or launch operations on a device.
        """

    def notice_writes(self, fqns: Iterable[str]) -> None:
        """Mark all rows of each table in ``fqns`` whose weight was written in place without a report by a hook."""

    def acknowledge_writes(self, fqns: Iterable[str]) -> None:
        """Ignore earlier in-place writes to the tables ``fqns``. Hooks call this after they have reported the rows."""

    def changed_since_sync(self, fqns: Iterable[str]) -> dict[str, Tensor | None]:
        """Return the local ids ``[N]`` of the rows changed since the last :meth:`synced`, by FQN; None if unknown."""

    def synced(self, fqns: Iterable[str]) -> None:
        """Record that a ``sync`` has made all replicas of the tables ``fqns`` equal."""

    def diverged(self, fqns: Iterable[str]) -> None:
        """Record that the replicas of the tables ``fqns`` may differ in any row."""


@dataclass(frozen=True, slots=True)
class HookContext:
    """Objects that the hooks of one tracker share.

    Args:
        listener: receives the reports.
        recorder: records errors of hooks and the time that hooks take.
        keys: yields a unique key for each write.
    """

    listener: HookListener
    recorder: Recorder
    keys: Iterator[int] = field(default_factory=itertools.count)


class Watcher:
    """Base class of the hooks that report lookups and writes of tables.

    Hooks never raise an error. If a hook fails, the next read returns all rows of the hook's tables, with unknown old
    states. If it fails before a write, the same applies to each read until the write or its backward pass ends, and to
    the first read after that. Marking the rows works after any error, because it needs no memory, lock or device
    operation. Errors are counted, and the first is logged. While a CUDA graph is captured, hooks launch no operation.

    Args:
        tables: FQNs of the tables to report.
        context: objects that the tracker's hooks share.

    Attributes:
        num_errors: number of errors of this hook.
        has_unseen: True after a lookup or write was captured, or was compiled into a graph that calls no hook.
    """

    def __init__(self, tables: Sequence[str], context: HookContext) -> None:
        self._tables = tables
        self._listener = context.listener
        self._keys = context.keys
        self._faults = [context.recorder.hook_errors.cell(table=fqn) for fqn in dict.fromkeys(tables)]
        self._timer = context.recorder.record_seconds.timer()
        self._removals: list[Callable[[], object]] = []
        self.has_unseen = False
        self.num_errors = 0

    def remove(self) -> None:
        """Remove the hook. Reports about lookups and writes that are still in progress are dropped."""
        for remove in self._removals:
            remove()
        self._removals.clear()  # some refer to this object
        self._listener = cast("HookListener", _NoListener())

    def _begin_write(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        if is_capturing():
            self._captured()
            return

        def begin() -> bool:
            with self._timer():
                self._listener.begin_write(key, ids)
            return True

        try:
            if not self._contained(begin, otherwise=False):
                self._listener.mark_all_later(ids, key)  # the write has not begun: no cut has returned its rows yet
        except BaseException:  # interrupted: the write does not begin
            self._listener.end_write_later(key)
            raise

    def _end_write(self, key: int, ids: Mapping[str, Tensor | None]) -> None:
        def end() -> bool:
            self._listener.end_write(key, ids)
            return True

        has_ended = False
        try:
            # A captured stream must not wait for another stream, as end_write() may require.
            has_ended = not is_capturing() and self._contained(end, otherwise=False)
        finally:  # also after an interrupt
            if not has_ended:
                self._listener.end_write_later(key)  # otherwise, it would be in progress for ever

    def _captured(self) -> None:
        self._unseen("replays of a CUDA graph call no hook")

    def omitted(self) -> None:
        """Record that a lookup or write is compiled with ``fullgraph=True`` and will not call the hook."""
        self._unseen("code that is compiled with fullgraph=True calls no hook; compile it without")

    def _unseen(self, reason: str) -> None:
        self._listener.mark_all_later(self._tables, UNSEEN)
        if self._tables and not self.has_unseen:
            self.has_unseen = True
            with suppress(Exception):  # out of memory
                _logger.warning("from now on every read returns all rows: %s: tables=%s", reason, list(self._tables))

    def _all_rows(self) -> dict[str, Tensor | None]:
        return dict.fromkeys(self._tables)

    def _contained(self, action: Callable[[], _T], *, otherwise: _T) -> _T:
        """Return the result of ``action``. If it raises, mark all rows at the next cut, and return ``otherwise``."""
        try:
            return action()
        except Exception:  # an error of the tracker must not interrupt the training step
            self._listener.mark_all_later(self._tables)
            self.num_errors += 1
            with suppress(Exception):  # whatever the hook ran out of may be missing here, too
                for cell in self._faults:
                    cell.add(1)
                if self.num_errors == 1:
                    _logger.exception("a hook failed; all rows count as changed: tables=%s", list(self._tables))
            return otherwise


class _NoListener:
    """Listener that ignores all reports. It replaces the listener of a removed hook."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class OtherUpdates:
    """Counter of updates to tensors that may be copies of the tables. A write to a table resets the counts.

    Args:
        versions: function that returns a different value after each in-place write to the tables.
    """

    def __init__(self, versions: Callable[[], object]) -> None:
        self.versions = versions
        self._since: object = None
        self._counts: Counter[str] = Counter()

    def count(self, fqns: Iterable[str]) -> None:
        """Count an update of tensors that may be copies of the tables ``fqns``."""
        now = self.versions()
        if now != self._since:
            self._counts.clear()
            self._since = now
        self._counts.update(fqns)

    def clear(self) -> None:
        """Reset all counts. Call this after an update of a table."""
        self._counts.clear()

    def counts(self) -> Counter[str]:
        """Return the number of counted updates by table FQN; empty if a table was written since the first update."""
        return self._counts if self._counts and self.versions() == self._since else Counter()


def is_capturing() -> bool:
    """Return True if the current CUDA stream is being captured into a CUDA graph."""
    # In a build of torch without CUDA, is_current_stream_capturing() raises.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class WrappedMethod:
    """Wrapper of a module's method that writes rows. It calls the hooks of all trackers before and after the method.

    A copy of the module has the original method, without hooks.

    Args:
        method: method to wrap.

    Attributes:
        hooks: functions to call before the method, with the method's arguments. Each of them returns a function to call
            after the method. Its argument is True if the method succeeded, False if it raised an error.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.hooks: list[Callable[..., Callable[[bool], object]]] = []

    @classmethod
    def add(cls, hook: Callable[..., Callable[[bool], object]], module: nn.Module, name: str) -> Callable[[], None]:
        """Add a hook to the method ``name`` of ``module``. Return a function that removes the hook."""
        held: Any = getattr(module, name)
        if not isinstance(held, cls):
            held = cls(held)
            setattr(module, name, held)
        held.hooks.append(hook)
        return partial(held._remove, hook, module, name)

    def _remove(self, hook: Callable[..., Callable[[bool], object]], module: nn.Module, name: str) -> None:
        """Remove a hook. After the last one, restore the original method ``name`` of ``module``."""
        if hook in self.hooks:
            self.hooks.remove(hook)
        if not self.hooks and module.__dict__.get(name) is self:
            delattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  those of the method
        """Call the hooks, then the method, then the functions that the hooks returned, in reverse order."""
        with ExitStack() as ends:  # even after an error, because nothing more is written then
            for hook in tuple(self.hooks):
                ends.push(partial(self._end, hook(*args, **kwargs)))
            self._method(*args, **kwargs)

    @staticmethod
    def _end(after: Callable[[bool], object], error: type[BaseException] | None, *_: object) -> None:
        after(error is None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return copy.deepcopy(self._method, memo)


def untraced(hook: Callable[..., None], omitted: Callable[[], object]) -> Callable[..., None]:
    """Return a function that calls ``hook``, and that ``torch.compile`` does not trace.

    The compiler breaks the graph at each call and runs the hook uncompiled. With ``fullgraph=True``, graph breaks are
    errors. In this case, the compiled graph does not call the hook, and the compiler calls ``omitted`` once while it
    builds the graph.

    Neither function may raise, and ``omitted`` must not launch operations on a device.
    """
    called = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    @torch.compiler.assume_constant_result  # the compiler runs it during the compilation
    def is_omitted() -> bool:
        if not _must_not_break():
            return False
        omitted()
        return True

    def call(*args: object) -> None:
        if torch.compiler.is_dynamo_compiling() and is_omitted():
            return
        called(*args)

    return call


def discard_compiled_code() -> None:
    """Discard all compiled code of this process. Call this after adding hooks, so that new code calls them."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()  # unlike torch.compiler.reset(), keeps CUDA graphs


def _must_not_break() -> bool:
    """Return True if the graph that is being compiled must not break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415  loaded by the compiler

    translator = InstructionTranslator.current_tx()
    return bool(getattr(translator, "one_graph", False) or getattr(translator, "error_on_graph_break", False))
