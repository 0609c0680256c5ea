"""Checks of arguments that many classes share."""

from __future__ import annotations

import math
import threading
from numbers import Real
from typing import TypeGuard

from delta_tracker.errors import InvalidArgumentError


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite integer or float, also of numpy; False for a bool, a string or any other object.

    Example:
        >>> is_number(0.5), is_number("0.5"), is_number(float("nan")), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)


def check_seconds(argument: str, seconds: object) -> None:
    """Check that an argument is a positive number of seconds that a wait accepts, or None.

    Raises:
        InvalidArgumentError: if it is not.
    """
    if seconds is not None and not (is_number(seconds) and 0 < seconds < threading.TIMEOUT_MAX):
        raise InvalidArgumentError(argument, seconds, "Pass seconds above 0, or None")
