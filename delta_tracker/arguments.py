"""Functions that check an argument of a public call. ``argument`` is the argument's name in the error message."""

import difflib
import functools
import inspect
import math
import os
import re
import threading
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from delta_tracker.errors import InvalidArgumentError

_T = TypeVar("_T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_number(value: object) -> TypeGuard[float]:
    """Return True if ``value`` is a finite integer or float of Python or numpy. Return False for a bool.

    Example:
        >>> is_number(0.5), is_number("0.5"), is_number(float("nan")), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)


def check_type(argument: str, value: object, kind: type, example: str) -> None:
    """Raise InvalidArgumentError unless ``value`` is None or of type ``kind``. The message suggests ``example``."""
    if value is not None and not isinstance(value, kind):
        raise InvalidArgumentError(argument, value, f"Pass a value such as {example}, or None")


def check_count(argument: str, value: object, least: int = 1) -> None:
    """Raise InvalidArgumentError unless ``value`` is an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise InvalidArgumentError(argument, value, f"Pass an integer of {least} or more")


def check_switch(argument: str, value: object) -> None:
    """Raise InvalidArgumentError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(argument, value, "Pass True or False")


def check_function(argument: str, value: object, example: str) -> None:
    """Raise InvalidArgumentError unless ``value`` is callable. The message suggests ``example``."""
    if not callable(value):
        raise InvalidArgumentError(argument, value, f"Pass a function, such as {example}")


def check_path(argument: str, path: object) -> Path:
    """Return ``path`` as a ``Path``. Raise InvalidArgumentError if it begins with ``~`` or is not a local path.

    Example:
        >>> check_path("cache", "/var/cache")
        PosixPath('/var/cache')
    """
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise InvalidArgumentError(argument, path, "Pass the path of a file or directory")
    if _URL.match(str(path)):
        raise InvalidArgumentError(argument, str(path), "Pass a path without scheme, such as /var/lib/rows")
    check_home(argument, Path(path))
    return Path(path)


def check_home(argument: str, path: Path) -> None:
    """Raise InvalidArgumentError if ``path`` begins with ``~``. The message suggests the expanded path."""
    try:
        expanded = path.expanduser()
    except RuntimeError:  # no user has this name
        expanded = path
    if expanded != path:
        raise InvalidArgumentError(argument, str(path), f"Write {expanded}: ~ is not expanded")


def refuses_unknown(**options: type) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator that makes the constructor raise InvalidArgumentError for unknown keyword arguments.

    ``options`` maps arguments of the constructor to the classes of their values. If one of these classes accepts the
    unknown argument, the message says so. Otherwise, it suggests a similar argument or lists all arguments.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        construct, known = kind.__init__, list(inspect.signature(kind).parameters)

        @functools.wraps(construct)
        def checked(self: _T, *args: Any, **given: Any) -> None:  # noqa: ANN401
            for name, value in given.items():
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                    remedy = f"Write {near[0]}=" if near else f"Pass arguments of {kind.__name__}: {', '.join(known)}"
                    for argument, option in options.items():
                        if name in inspect.signature(option).parameters:
                            remedy = f"Write {argument}={option.__name__}({name}=...)"
                    raise InvalidArgumentError(name, value, remedy)
            construct(self, *args, **given)

        setattr(kind, "__init__", checked)  # noqa: B010  mypy rejects the assignment
        return kind

    return decorate


def check_seconds(argument: str, seconds: object) -> None:
    """Raise InvalidArgumentError unless ``seconds`` is None or a number above 0 and below ``threading.TIMEOUT_MAX``."""
    if seconds is not None and not (is_number(seconds) and 0 < seconds < threading.TIMEOUT_MAX):
        raise InvalidArgumentError(argument, seconds, "Pass seconds above 0, or None")
