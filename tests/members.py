"""A member of an enum that no function knows, as a new member is until every function has a case for it."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

_Kind = TypeVar("_Kind", bound=Enum)


def unknown(kind: type[_Kind]) -> _Kind:
    """Return an instance of an enum that is not among its members."""
    value = "unknown" if issubclass(kind, str) else 99
    member = kind._member_type_.__new__(kind, *([value] if issubclass(kind, str | int) else []))
    member._name_, member._value_ = "UNKNOWN", value
    return member
