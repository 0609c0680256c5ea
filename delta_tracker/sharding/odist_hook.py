"""Run work when a sharded collection has launched its output distribution. The work overlaps with the communication.

At this point TorchRec calls the function in the collection's post-odist slot, which holds only one function. The
tracker puts an :class:`OdistSlot` there, which calls the previous function, then the hooks of all trackers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from delta_tracker.monitor.recorder import Recorder
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.kernel_hooks import UpdateListener, Watcher, is_capturing
from delta_tracker.sharding.untraced import untraced

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class OdistSlot:
    """Function for TorchRec's post-odist slot of one collection: calls the previous function, then all trackers' hooks.

    If ``hooks`` is empty, only the previous function is called. A function that replaced this object in the slot may
    therefore continue to call this object after all trackers have removed their hooks.

    Args:
        previous: the function that was in the slot; None if it was empty.

    Attributes:
        hooks: the trackers' hooks; they must not raise.
    """

    def __init__(self, previous: Callable[..., None] | None) -> None:
        self.previous = previous
        self.hooks: list[Callable[[], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  what torchrec passes
        """Call the previous function with the arguments, then the hooks without arguments."""
        if self.previous is not None:
            self.previous(*args, **kwargs)
        for hook in tuple(self.hooks):
            hook()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None] | None:
        """Return a copy of the previous function: a copy of the collection has no hooks."""
        return copy.deepcopy(self.previous, memo)


class PostOdistHook(Watcher):
    """Hook that reports each launch of a collection's output distributions.

    A collection has one output distribution per sharding type. If TorchRec calls the collection's post-odist function,
    the hook is installed as that function. Otherwise, it registers module hooks on the distributions. TorchRec does not
    call the function of a collection inside a managed-collision module, which distributes the output itself.

    Args:
        module: the collection.
        tables: FQNs of its tables.
        listener, keys, recorder: those of :class:`Watcher`.
        has_slot: True if TorchRec calls the collection's post-odist function.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401  a class of torchrec's
        tables: Sequence[str],
        listener: UpdateListener,
        keys: itertools.count[int],
        recorder: Recorder,
        *,
        has_slot: bool,
    ) -> None:
        super().__init__(tables, listener, keys, recorder)
        self._launched = untraced(self._report, lambda: None)  # without it, the next read compacts the log
        self._module = module
        self._slot: OdistSlot | None = None
        self._handles: list[RemovableHandle] = []
        if has_slot:
            self._slot = self._shared_slot()
            self._slot.hooks.append(self._launched)
        else:
            # A deep copy of the collection shares a function, and would copy a bound method with the listener.
            after = lambda *_: self._launched()  # noqa: E731
            self._handles = [dist.register_forward_hook(after) for dist in module._output_dists]  # noqa: SLF001

    def remove(self) -> None:
        """Stop reporting. Removing the last hook restores the previous function in the slot.

        The slot is left unchanged if it no longer holds the :class:`OdistSlot`.
        """
        for handle in self._handles:
            handle.remove()
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.hooks.remove(self._launched)
            if not slot.hooks and self._module.post_odist_tracker_fn is slot:
                self._module.post_odist_tracker_fn = slot.previous
        super().remove()

    def _shared_slot(self) -> OdistSlot:
        """Return the collection's :class:`OdistSlot`.

        If it has none, register one that also calls the current post-odist function, if any.
        """
        held = self._module.post_odist_tracker_fn
        if isinstance(held, OdistSlot):
            return held
        slot = OdistSlot(held)
        self._module.post_odist_tracker_fn = None  # torchrec warns if it overwrites a function
        self._module.register_post_odist_tracker_fn(slot)
        return slot

    def _report(self) -> None:
        self._contained(self._output_launched, otherwise=None)

    def _output_launched(self) -> None:
        if not is_capturing():
            self._listener.output_launched()


def watch_output_dists(
    model: nn.Module, found: Discovery, listener: UpdateListener, keys: itertools.count[int], recorder: Recorder
) -> Iterator[Watcher]:
    """Register a post-odist hook on each sharded collection of a model, and yield the hook; see :class:`Watcher`."""
    bypassed = {getattr(module, "_embedding_module", None) for module in model.modules()}
    for fqn, module in found.modules.items():
        tables = [table for table in found.tables if table.startswith(f"{fqn}." if fqn else "")]
        has_slot = hasattr(module, "register_post_odist_tracker_fn") and module not in bypassed
        yield PostOdistHook(module, tables, listener, keys, recorder, has_slot=has_slot)
