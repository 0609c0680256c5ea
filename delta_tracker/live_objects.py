"""Base classes that define how objects with hooks, locks or threads behave on fork, pickle and copy."""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from operator import methodcaller
from typing import ClassVar, Never, Protocol, SupportsIndex

from delta_tracker.errors import UncopyableError


class Trained(Protocol):
    """Interface of an object that reports the memory of tables that are being trained, see :func:`trained_memory`."""

    def spans(self) -> set[tuple[str, int, int]]:
        """Return the device, start and end address of the tables' memory blocks; empty once training has ended."""


_TRAINED: weakref.WeakValueDictionary[int, Trained] = weakref.WeakValueDictionary()
_announced: list[int] = [0]


def announce_training(trained: Trained) -> None:
    """Include ``trained`` in :func:`trained_memory` until it is garbage-collected. Call this when training begins."""
    _TRAINED[id(trained)] = trained
    _announced[0] += 1
    _register_handlers()


def num_announced() -> int:
    """Return the number of calls of :func:`announce_training`. When it changes, call :func:`trained_memory` again."""
    return _announced[0]


def trained_memory() -> set[tuple[str, int, int]]:
    """Return the device, start and end address of the memory of tables in training. Predictors must not write to it."""
    living = [trained for reference in _TRAINED.valuerefs() if (trained := reference()) is not None]
    return {span for trained in living for span in trained.spans()}


class Uncopied:
    """Base class of objects that can neither be pickled nor copied. Each subclass names an alternative in ``remedy``.

    ``pickle``, ``torch.save``, ``copy.copy`` and ``copy.deepcopy`` raise
    :class:`~delta_tracker.errors.UncopyableError`.
    """

    _remedy: ClassVar[str]

    def __init_subclass__(cls, *, remedy: str = "") -> None:
        super().__init_subclass__()
        if remedy:
            cls._remedy = remedy

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        raise UncopyableError(type(self).__name__, self._remedy)


class Forkable(ABC):
    """Base class of objects that remain usable after ``os.fork``.

    Register each object with :func:`protect`. The methods of a registered object are called before and after each fork,
    in the thread that forks.
    """

    def before_fork(self) -> None:  # noqa: B027  optional
        """Bring the object into a consistent state before a fork.

        Must not block for long, even if the calling thread holds a lock of the object.
        """

    def after_fork_in_parent(self) -> None:  # noqa: B027
        """Undo :meth:`before_fork`."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Replace the locks that other threads of the parent process may have held.

        Only the calling thread exists in the child process.
        """


_PROTECTED: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()


def protect(forkable: Forkable) -> None:
    """Call the methods of ``forkable`` before and after each fork, until the object is garbage-collected."""
    _PROTECTED[id(forkable)] = forkable
    _register_handlers()


@cache
def _register_handlers() -> None:
    """Register the fork handlers once, at the first use, because they cannot be removed."""
    os.register_at_fork(
        before=partial(_call, methodcaller("before_fork")),
        after_in_parent=partial(_call, methodcaller("after_fork_in_parent")),
        after_in_child=_after_fork_in_child,
    )


def _after_fork_in_child() -> None:
    _TRAINED.clear()  # the child has its own copy of the tables
    _call(methodcaller("after_fork_in_child"))


def _call(method: Callable[[Forkable], object]) -> None:
    for reference in _PROTECTED.valuerefs():  # an atomic copy: other threads may add objects during the iteration
        forkable = reference()
        if forkable is not None:
            method(forkable)
