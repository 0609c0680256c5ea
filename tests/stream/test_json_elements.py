"""Elements of JSON arrays and objects are found one by one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec import Raw, ValidationError
from msgspec.json import Decoder

from delta_tracker.stream.format.json_elements import elements

_TEXTS = ["", "a", ",", "]", "}", "[{", '"', "\\", '\\"', "\u00e9", "x" * 1500]


def _some_value(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(6 if depth else 4)
    if kind == 4:
        return [_some_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {f"{draw.choice(_TEXTS)}{i}": _some_value(draw, depth - 1) for i in range(draw.randrange(4))}
    return [None, draw.randrange(-9, 99999) / 4, draw.choice(_TEXTS), [draw.randrange(99)] * draw.randrange(2000)][kind]


def test_the_elements_are_those_of_a_parser_that_reads_the_whole_value() -> None:
    draw = random.Random(0)
    for _ in range(300):
        array = [_some_value(draw, 4) for _ in range(draw.randrange(4))]
        members = {f"{draw.choice(_TEXTS)}{i}": value for i, value in enumerate(array)}
        layout = {"indent": draw.choice([None, 1]), "separators": draw.choice([(",", ":"), (" , ", " : ")])}
        text, object_text = json.dumps(array, **layout), json.dumps(members, **layout)
        assert list(elements(Decoder(), Raw(text.encode()), "$")) == array
        found = list(elements(Decoder(), Raw(object_text.encode()), "$", opening=b"{"))
        assert found == [{name: value} for name, value in members.items()]


@pytest.mark.parametrize(("opening", "text"), [(b"[", b"{}"), (b"{", b"[]"), (b"[", b"null"), (b"{", b'"x"')])
def test_a_value_of_another_type_is_refused(opening: bytes, text: bytes) -> None:
    with pytest.raises(ValidationError, match="Expected"):
        list(elements(Decoder(), Raw(text), "$.parts", opening=opening))
