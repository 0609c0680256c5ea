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
    """Interface of an object that reports the memory of tables in training to :func:`trained_memory`."""

    def spans(self) -> set[tuple[str, int, int]]:
        """Return the memory blocks as ``(device, start address, end address)``. The set is empty after training."""


_TRAINED: weakref.WeakValueDictionary[int, Trained] = weakref.WeakValueDictionary()
_announced: list[int] = [0]


def announce_training(trained: Trained) -> None:
    """Include the memory of ``trained`` in :func:`trained_memory` until ``trained`` is garbage-collected."""
    _TRAINED[id(trained)] = trained
    _announced[0] += 1
    _register_handlers()


def num_announced() -> int:
    """Return the number of :func:`announce_training` calls. If it increases, call :func:`trained_memory` again."""
    return _announced[0]


def trained_memory() -> set[tuple[str, int, int]]:
    """Return the memory blocks of all tables in training, to which predictors must not write; see :class:`Trained`."""
    living = [trained for reference in _TRAINED.valuerefs() if (trained := reference()) is not None]
    return {span for trained in living for span in trained.spans()}


class Uncopied:
    """Base class of objects that can be neither pickled nor copied.

    ``pickle``, ``torch.save``, ``copy.copy`` and ``copy.deepcopy`` raise
    :class:`~delta_tracker.errors.UncopyableError`. The class argument ``remedy`` of a subclass is the error's remedy.
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

    Register each object with :func:`protect`. Then each fork calls the object's methods, in the thread that forks.
    """

    def before_fork(self) -> None:  # noqa: B027  optional
        """Bring the object into a consistent state before a fork.

        This method must return quickly, even if the calling thread holds a lock of the object.
        """

    def after_fork_in_parent(self) -> None:  # noqa: B027
        """Undo :meth:`before_fork` in the parent process."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Replace the object's locks in the child process.

        Other threads of the parent process may have held the locks. These threads do not exist in the child.
        """


_PROTECTED: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()


def protect(forkable: Forkable) -> None:
    """Register ``forkable``: each fork calls its methods until the object is garbage-collected."""
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
