"""Checks of arguments that many classes share."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite integer or float, also of numpy; False for a bool, a string or any other object.

    Example:
        >>> is_number(0.5), is_number("0.5"), is_number(float("nan")), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)
