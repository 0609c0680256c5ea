"""Base classes of the errors, and copies of errors without tracebacks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar, Self, TypeVar

_MAX_HELD = 10_000
_Error = TypeVar("_Error", bound=BaseException)
_Own = TypeVar("_Own", bound="DeltaTrackerError")


class DeltaTrackerError(Exception):
    """Base class of all errors of the library.

    Args:
        problem: description of the error, with the offending object.
        remedy: instruction for the user.
    """

    __module__ = "delta_tracker.errors"  # shown in tracebacks and stored by pickle, wherever the class is defined
    keeps_cause: ClassVar[bool] = False  # the cause is part of the error, so that a copy has it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("delta_tracker.errors."):
            cls.__module__ = DeltaTrackerError.__module__

    def __init__(self, problem: str, remedy: str) -> None:
        problem = problem.removesuffix(".")  # the text of another error may be its end
        super().__init__(f"{problem}. {remedy}.")
        self.problem, self.remedy = problem, remedy

    def advising(self, remedy: str) -> Self:
        """Replace the remedy, if the cause needs another one than that of the class. Return the error."""
        self.remedy = remedy
        self.args = (f"{self.problem}. {remedy}.",)
        return self

    def __copy__(self) -> Self:
        return _rebuilt(type(self), self.args, vars(self), self.__cause__ if self.keeps_cause else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function that rebuilds the error and its arguments, for pickle and deepcopy."""
        cause = _picklable(self.__cause__) if self.keeps_cause else None
        return _rebuilt, (type(self), self.args, vars(self), cause)


class StreamError(DeltaTrackerError):
    """Base class of the errors raised by streams, storage, publishers and predictors."""


def _rebuilt(kind: type[_Own], args: tuple[Any, ...], fields: Mapping[str, Any], cause: BaseException | None) -> _Own:
    """Return an error with these ``args`` and attributes. The constructors of subclasses take other arguments."""
    error = kind.__new__(kind)
    super(DeltaTrackerError, error).__init__(*args)
    vars(error).update(fields)
    if cause is not None:
        error.__cause__ = cause
    return error


def _picklable(error: BaseException | None) -> BaseException | None:
    """Return ``error``, or None if pickle cannot save and load it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  the bytes are this process's own
    except Exception:  # noqa: BLE001  the constructor of any class may run
        return None
    return error


def unraised(error: _Error) -> _Error:
    """Return a copy of an error without traceback, cause and context, as if it had never been raised.

    An object that keeps an error must keep such a copy, and raise another one. The frames of a traceback keep their
    variables alive, for example the rows of a version. A raise also adds its frames to those of earlier raises.

    The cause is kept only if it is part of the error, see ``keeps_cause``. It is copied in the same way. If an error of
    another package cannot be copied, the error itself is returned after these references are removed. The errors within
    the error, such as those of an ``ExceptionGroup``, are not copied but lose their tracebacks.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  the constructor of any class may run
        copied = error
    if type(copied) is not type(error) or str(copied) != str(error):
        copied = error
    cause = error.__cause__ if isinstance(error, DeltaTrackerError) and error.keeps_cause else None
    copied.__traceback__ = copied.__context__ = None
    copied.__cause__ = None if cause is None else unraised(cause)
    _remove_tracebacks(_held(copied))
    return copied


def _remove_tracebacks(values: list[object]) -> None:
    """Remove the tracebacks of all errors in ``values``, and of the errors that these and their containers hold.

    The search ends after 10,000 errors and containers. It visits each of them once.
    """
    pending, seen = values, set[int]()
    while pending and len(seen) < _MAX_HELD:
        value = pending.pop()
        if id(value) in seen or not isinstance(value, BaseException | list | tuple | dict):
            continue
        seen.add(id(value))
        if isinstance(value, BaseException):
            value.__traceback__ = None
            pending += [*_held(value), value.__cause__, value.__context__]
        else:
            pending += islice(value.values() if isinstance(value, dict) else value, _MAX_HELD)


def _held(error: BaseException) -> list[object]:
    """Return the arguments and attributes of an error, and the errors of a group."""
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*error.args, *vars(error).values(), *group]


def listed(names: Iterable[object]) -> str:
    """Return the quoted names, separated by commas; ``none`` if there are no names."""
    return ", ".join(repr(name) for name in names) or "none"
