"""Iteration over the elements of long JSON arrays and objects, which builds no objects for the elements."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Raw, ValidationError

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# Text of an element outside of nested arrays and objects, but with arrays of plain values. The repetition is limited,
# because a match does not release the interpreter lock.
_INNER = rb'(?:[^][{}"]{1,999}+|' + _STRING + rb'|\[[^][{}"]{0,999}+\]){1,999}+'
# Without a group, a match is text of an element, for example of a whole block.
_BRACKET = rb"\{(?:" + _INNER + rb")?+\}|(?P<opening>[\[{])|(?P<closing>[\]}])"
_TOKEN = re.compile(rb'[^][{}",]{1,999}+|' + _STRING + rb"|(?P<comma>,)|" + _BRACKET)
_EMPTY = re.compile(rb"\s*+\Z")
_NESTED_TOKEN = re.compile(_INNER + rb"|" + _BRACKET)


def elements(value: Raw, path: str, *, opening: bytes = b"[") -> Iterator[memoryview]:
    """Yield the bytes of each element of an array, or of each member of an object, without the commas.

    ``value`` is valid JSON, and ``path`` its path for the :class:`ValidationError` if it does not begin with
    ``opening``, which is ``[`` for an array and ``{`` for an object.
    """
    data = memoryview(value)
    if bytes(data[:1]) != opening:
        raise ValidationError(f"Expected `{'array' if opening == b'[' else 'object'}` - at `{path}`")
    begin, place, end, depth = 1, 1, len(data) - 1, 0
    if _EMPTY.match(data, 1, end):
        return
    while place < end:
        token = (_NESTED_TOKEN if depth else _TOKEN).match(data, place, end)
        assert token is not None, "valid JSON has no other tokens"
        place, group = token.end(), token.lastgroup
        if group == "comma":
            yield data[begin : place - 1]
            begin = place
        elif group is not None:
            depth += 1 if group == "opening" else -1
    yield data[begin:end]
