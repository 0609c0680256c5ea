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


def check_type(argument: str, value: object, kind: type, example: str) -> None:
    """Raise InvalidArgumentError unless ``value`` is None or an instance of ``kind``. The message shows ``example``."""
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


def check_seconds(argument: str, seconds: object) -> None:
    """Raise InvalidArgumentError unless ``seconds`` is None, or above 0 and below ``threading.TIMEOUT_MAX``."""
    if seconds is not None and not (is_number(seconds) and 0 < seconds < threading.TIMEOUT_MAX):
        raise InvalidArgumentError(argument, seconds, "Pass seconds above 0, or None")
