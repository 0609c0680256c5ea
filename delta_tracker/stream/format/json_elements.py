"""Decoder of the elements of long JSON arrays and objects one by one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TypeVar

from msgspec import Raw, ValidationError
from msgspec.json import Decoder

T = TypeVar("T")

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# Text of an element outside of nested arrays and objects, but with arrays of plain values. The repetition is limited,
# because a match does not release the interpreter lock.
_INNER = rb'(?:[^][{}"]{1,999}+|' + _STRING + rb'|\[[^][{}"]{0,999}+\]){1,999}+'
# Without a group, a match is text of an element, for example of a whole block.
_BRACKET = rb"\{(?:" + _INNER + rb")?+\}|(?P<opening>[\[{])|(?P<closing>[\]}])"
_TOKEN = re.compile(rb'[^][{}",]{1,999}+|' + _STRING + rb"|(?P<comma>,)|" + _BRACKET)
_EMPTY = re.compile(rb"\s*+\Z")
_DEPTHS = {"comma": 0, "opening": 1, "closing": -1}
_NESTED_TOKEN = re.compile(_INNER + rb"|" + _BRACKET)


def elements(decoder: Decoder[T], value: Raw, path: str, *, opening: bytes = b"[") -> Iterator[T]:
    """Decode and yield each element of an array, or each member of an object as an object with one member.

    ``value`` is valid JSON that begins with ``opening``, ``[`` for an array and ``{`` for an object. A
    :class:`ValidationError` has the place in the entry, of which ``path`` is the path of ``value``.
    """
    data = memoryview(value)
    is_object = opening == b"{"
    if bytes(data[:1]) != opening:
        raise ValidationError(f"Expected `{'object' if is_object else 'array'}` - at `{path}`")
    place, end = 1, len(data) - 1
    if _EMPTY.match(data, 1, end):
        return
    for index in itertools.count():
        begin, depth, group = place, 0, None
        while group != "comma" and place < end:
            token = (_NESTED_TOKEN if depth else _TOKEN).match(data, place, end)
            assert token is not None, "valid JSON has no other tokens"
            place, group = token.end(), token.lastgroup
            if group is not None:
                depth += _DEPTHS[group]
        element = data[begin : place - (group == "comma")]
        try:
            found = decoder.decode(b"".join((b"{", element, b"}")) if is_object else element)
        except ValidationError as error:
            raise located(error, path if is_object else f"{path}[{index}]") from None
        yield found
        if group != "comma":
            return


def located(error: ValidationError, path: str) -> ValidationError:
    """Return the error of a decoder with the place in the entry, from the ``path`` of the value that was decoded."""
    problem, _, place = str(error).partition(" - at `$")
    return ValidationError(f"{problem} - at `{path}{place or '`'}")
