"""Count calls of functions in other packages that write weights through ``.data``, which increments no version counter.

:data:`NAMED_WRITERS` lists the functions. Each of them is wrapped when its module is imported. The weights that a call
writes are unknown. Therefore :class:`~delta_tracker.sharding.weights.WriteWatch` reports a write to every table after
each call. This module does not import their packages.
"""

import sys
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

# The hooks in which the callback swaps weights with their average, and copies the average at the end.
_AVERAGING = ("WeightAveraging", ("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"))

# Module to class and methods. A subclass that calls the methods of the class is covered.
NAMED_WRITERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pytorch_lightning.callbacks.weight_averaging": _AVERAGING,
    "lightning.pytorch.callbacks.weight_averaging": _AVERAGING,
    "diffusers.training_utils": ("EMAModel", ("copy_to", "restore")),
}


class _Calls:
    """Counter of the calls of the functions in :data:`NAMED_WRITERS`."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._missing = dict(NAMED_WRITERS)
        self._lock = Lock()

    def count(self) -> int:
        for name in tuple(self._missing):
            if name in sys.modules:
                self._wrap(name)
        return self._num_calls

    def _wrap(self, name: str) -> None:
        with self._lock:
            kind, methods = NAMED_WRITERS[name]
            owner = getattr(sys.modules.get(name), kind, None)
            if name not in self._missing or owner is None:  # another thread was first, or the import is in progress
                return
            for method in methods:
                if hasattr(owner, method):
                    setattr(owner, method, self._counted(getattr(owner, method)))
            self._num_calls += 1  # earlier calls were not counted
            del self._missing[name]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return function(*args, **kwargs)
            finally:  # even after an error, because some weights may have been written
                with self._lock:
                    self._num_calls += 1

        return counted


_CALLS = _Calls()


def num_named_writes() -> int:
    """Return a number that increases with each call of a function in :data:`NAMED_WRITERS`."""
    return _CALLS.count()
