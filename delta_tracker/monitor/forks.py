"""What a forked child must do before it may record: no thread of the parent is in it, and any lock may be held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What has to be put right in a child."""

    def after_fork(self) -> None:
        """Called in the child, where no other thread runs."""


_protected: weakref.WeakSet[Forkable] = weakref.WeakSet()
_is_registered: list[bool] = []


def protect(forkable: Forkable) -> None:
    """Have ``forkable`` put right in every child from now on, as long as it lives."""
    _protected.add(forkable)
    # Cannot be undone, so it is done once, and not before somebody needs it.
    if not _is_registered:
        os.register_at_fork(after_in_child=_after_in_child)
        _is_registered.append(True)


def _after_in_child() -> None:
    for forkable in list(_protected):
        forkable.after_fork()
