"""Handlers that run before and after ``os.fork`` for objects with locks or threads."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod


class Forkable(ABC):
    """Base class of objects with locks or threads that remain usable after ``os.fork``.

    Once an object is registered with :func:`protect`, its methods are called before and after each fork, in the thread
    that forks.
    """

    def before_fork(self) -> None:  # noqa: B027  optional
        """Bring the object to a consistent state before a fork.

        Must not block for long, even if the calling thread holds a lock of the object.
        """

    def after_fork_in_parent(self) -> None:  # noqa: B027
        """Undo :meth:`before_fork`."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Replace the locks that other threads of the parent process may have held.

        Only the calling thread exists in the child process.
        """


class _Registry:
    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()
        self._is_registered = False

    def add(self, forkable: Forkable) -> None:
        self._known[id(forkable)] = forkable
        if not self._is_registered:  # handlers cannot be removed: register them once, at the first use
            self._is_registered = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
            )

    def _alive(self) -> list[Forkable]:
        # An atomic copy: other threads may add objects during the iteration.
        return [forkable for reference in self._known.valuerefs() if (forkable := reference()) is not None]

    def _before(self) -> None:
        for forkable in self._alive():
            forkable.before_fork()

    def _after_in_parent(self) -> None:
        for forkable in self._alive():
            forkable.after_fork_in_parent()

    def _after_in_child(self) -> None:
        for forkable in self._alive():
            forkable.after_fork_in_child()


_registry = _Registry()


def protect(forkable: Forkable) -> None:
    """Call the methods of ``forkable`` before and after each fork, until the object is garbage-collected."""
    _registry.add(forkable)
