"""Cases of manifests: each breaks one rule, or uses a freedom that readers must allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.conformance.case import Case, Outcome, Run, Trial
from tests.conformance.maker import identity, owned, plain
from tests.conformance.stream import Entry, Stream, entry_name

_HASH = "0123456789abcdef" * 2
_MISSING = object()
_COUNT = "A **count** is an integer in `[0, 2^63)` without fraction or exponent"
_REJECT = "Readers MUST reject an object with a duplicate name, `NaN`, a number out of range, and `true` instead of 1"
_UNKNOWN = "Readers MUST ignore unknown fields"
_IDENTITY = "The `rows` of the buckets have at least one row each, ascend, and go from 0 to `num_rows` without gaps"
_NEWER = "A reader that finds a `format` that is an integer above 2 MUST report that a newer release is needed"

_NO_COUNTS = [-1, 1.0, 2**63, 2**64, 10**400, "1", True, None, [], _MISSING]
_NO_HEX = ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "0" * 32 + "\n", 0, None, _MISSING]
_NO_RANGES = [[3, 2], [1], [0, 1, 2], [-1, 0], [0, 1.0], [0, 2**63], None, {}, _MISSING]
_NO_LINKS = [{}, [], "2", {"version": 2}, {"version": 2, "xxh3": "00"}, {"version": 2.0, "xxh3": _HASH}]
_NO_NAMES = [
    "../secret", "parts/../../x.safetensors", "/etc/passwd", "parts/a/b.safetensors", "parts/a.safetensors\n",
    "parts/A.safetensors", "parts/.safetensors", "parts/a.safetensor", "xparts/a.safetensors",
    "parts/a.safetensors/../b.safetensors", "parts/a\0.safetensors", "", None, 1, _MISSING,
]  # fmt: skip

# Values that the field at a path of the newest entry, a delta, must not have, and the rule.
_PLAIN: dict[str, tuple[str, list[Any]]] = {
    "format": ("1; readers MUST reject anything else", [0, -1, None, "1", "2", True, 1.0, 2.0, [], {}, _MISSING]),
    "stream": ("the same in all entries of a stream", [*_NO_HEX, "6" * 32]),
    "generation": ("MUST NOT decrease from entry to entry", [0, *_NO_COUNTS]),
    "writer": ("id of the publisher, one per claim", _NO_HEX),
    "version": ("the version in the entry's name", [2, 4, *_NO_COUNTS]),
    "kind": (
        "`claim` (without tables, dense, parts and merges), `snapshot` or `delta`",
        ["full", "Delta", "merged", "snapshot", "claim", 1, None, [], _MISSING],
    ),
    "parent": (
        "null only for version 0 and for a merged entry from the start",
        [None, {"version": 2, "xxh3": _HASH}, {"version": 1, "xxh3": _HASH}, *_NO_LINKS, _MISSING],
    ),
    "snapshot": ("the newest snapshot up to and including this version", [3, 4, -1, True, "1", 1.0, 2**63, _MISSING]),
    "batches": ("A **range** `[first, end]` is half-open: two counts with `first <= end`", _NO_RANGES),
    "cut": ("`[0, 2^53)`", [-1, "now", True, None, 2**53, 10**400, _MISSING]),
    "created": ("`[0, 2^53)`", [-1, "now", True, None, 2**53, 10**400, _MISSING]),
    "pending_rows": (_COUNT, _NO_COUNTS),
    "tables": ("a name in `tables`", [None, [], {}, {"t": {}}, _MISSING]),
    "tables.t.num_rows": (_COUNT, [*_NO_COUNTS, 9]),
    "tables.t.dim": ("count >= 1", [0, *_NO_COUNTS, 3]),
    "tables.t.dtype": ('"F32", "F16" or "BF16"', ["F64", "I64", "INT8", "f32", None, _MISSING]),
    "dense": ("Each name in `dense` appears in the `dense` of exactly one part", [None, [], {}, _MISSING]),
    "dense.x": ("Each name in `dense` appears in the `dense` of exactly one part", [{"dtype": "F32", "shape": [1]}]),
    "dense.w": ("Each name in `dense` appears in the `dense` of exactly one part", [_MISSING]),
    "dense.w.dtype": ("Dense dtypes are", ["C64", "U16", "F8_E4M3", "float", None, "I32", _MISSING]),
    "dense.w.shape": (
        "at most 16 dimensions, fewer than 2^63 bytes",
        [None, 3, [-1], [1.0], [True, 3], [3, 2], [6], [2, 3, 1], [2**31, 2**31], [0, 2**62], [0, 2**62, 2**62],
         [1] * 15 + [2, 3], [2**32, 2**32, 0], [2**63], _MISSING],
    ),
    "parts": ("| `parts` | array", [None, {}, [1], [None], _MISSING]),
    "parts.0.name": ("The full `name` matches", _NO_NAMES),
    "parts.0.num_bytes": ("`num_bytes` against the object", [0, 8, 2**40, 2**62, *_NO_COUNTS]),
    "parts.0.xxh3": ("the size, xxh3, header and ids of each part", [_HASH, *_NO_HEX]),
    "parts.0.blocks": ("The part MUST hold exactly the tensors that its record implies", [None, {}, [], [1], _MISSING]),
    "parts.0.blocks.0.table": ("a name in `tables`", ["x", "", "w", None, _MISSING]),
    "parts.0.blocks.0.rows": ("inside the table", [[0, 11], [0, 2], [0, 2**62], *_NO_RANGES]),
    "parts.0.blocks.0.columns": ("inside the table; at least one column", [[0, 5], [2, 2], [0, 2**62], *_NO_RANGES]),
    "parts.0.blocks.0.num_rows": ("at most the length of `rows`", [2, 4, 11, 2**62, *_NO_COUNTS]),
    "parts.0.blocks.0.ids": (
        "`all`: every row of the range; `list`: the ids in", ["all", "gaps", "some", "", 1, None, _MISSING]
    ),
    "parts.0.blocks.0.encoding": (
        "`F32`, `F16`, `BF16`, `INT8`, or `INT4`", ["F64", "F16", "INT8", "INT4", "I64", "", None, _MISSING]
    ),
    "parts.0.dense": (
        "Each name in `dense` appears in the `dense` of exactly one part",
        [None, [], ["w", "n"], ["w", "n", "flags", "n"], ["w", "n", "x"], ["w", "n", 1], {}, _MISSING],
    ),
    "parts.1.dense": ("Each name in `dense` appears in the `dense` of exactly one part", [["w"]]),
    "merges": ("null in the log", [*_NO_LINKS, {"version": 3, "xxh3": _HASH}, {"version": 2, "xxh3": _HASH}, _MISSING]),
}  # fmt: skip

_STORED = {"name": "parts/s.safetensors", "num_bytes": 1016, "body": 1000, "xxh3": _HASH}
_OWNED: dict[str, tuple[str, list[Any]]] = {
    "event_time": ("`[0, 2^53)`", [-1, "now", True, 2**53, _MISSING]),
    "training": ("| `training` | array", [
        None, {}, [1], [_STORED | {"num_bytes": 1017}], [_STORED | {"name": "log/1.json"}], [_STORED | {"body": 0}],
        _MISSING,
    ]),
    "owners": ("name of a table with raw ids", [
        None, [], {"r": None}, {"r": {"admitted": 1}}, {"r": {"admitted": 1, "evicted": -1}},
        {"t": {"admitted": 1, "evicted": 1}}, _MISSING,
    ]),
    "tables.t.columns": ("ascending, from 0 to `dim` without gaps", [
        None, [], [[0, 3]], [[0, 3], [3, 5]], [[0, 3], [2, 4]], [[2, 4], [0, 2]], [[0, 4], [4, 4]], [[1, 4]],
        [[0, 2], [2, 4]], _MISSING,
    ]),
    "tables.t.optimizer": ("`[A-Z0-9_]{1,64}`", [None, "", "adam", "A" * 65, 3, "ADAM\n", _MISSING]),
    "tables.t.states": ("at most 16 objects", [
        None, {}, [1], [{}], [{"name": "x", "dtype": "F32"}], [{"name": "x", "dtype": "I64", "width": "range"}],
        [{"name": "X", "dtype": "F32", "width": "range"}], [{"name": "x", "dtype": "F32", "width": "rows"}],
        [{"name": "x", "dtype": "F32", "width": "range"}] * 2,
        [{"name": f"x{number}", "dtype": "F32", "width": "range"} for number in range(17)], [], _MISSING,
    ]),
    "tables.t.identity": (_IDENTITY, [identity(1, (0, 9, None)), "I64", 3, _MISSING]),
    "tables.r.identity": ("MUST be a snapshot", [
        None, identity(101, (0, 5, 4), (5, 8, 7)), identity(100, (0, 5, 3), (5, 8, 7)), identity(100, (0, 8, 7)),
        _MISSING,
    ]),
    "tables.r.identity.dtype": ("`I64`", ["I32", None, _MISSING]),
    "tables.r.identity.hash_size": (_COUNT, _NO_COUNTS),
    "tables.r.identity.buckets": (_IDENTITY, [
        None, {}, [], [[0, 8]], [{"rows": [0, 8]}], [{"default": 1}],
        *(identity(100, *buckets)["buckets"] for buckets in (
            [(0, 5, 4)], [(0, 5, 4), (5, 9, 7)], [(1, 5, 4), (5, 8, 7)], [(0, 5, 4), (4, 8, 7)], [(0, 5, 4), (6, 8, 7)],
            [(0, 5, 5), (5, 8, 7)], [(0, 5, 4), (5, 8, None)], [(0, 5, None), (5, 8, 7)],
            [(0, 5, 4), (5, 8, 7), (8, 8, None)], [(5, 8, 7), (0, 5, 4)], [(0, 5, -1), (5, 8, 7)],
            [(0, 5, 4.0), (5, 8, 7)],
        )), _MISSING,
    ]),
    "tables.r.columns": ("A table with raw ids MUST have one range in `columns`", [[[0, 1], [1, 2]]]),
    "parts.0.body": ("`num_bytes = body + 16 n`", [0, 1, *_NO_COUNTS]),
    "parts.0.states": ("`states` MUST be null if and only if no block of the part belongs to a table with states", [
        None, {}, _STORED | {"body": 0, "num_bytes": 0}, _STORED | {"xxh3": "00"},
        _STORED | {"name": "parts/../x.safetensors"}, _MISSING,
    ]),
    "parts.0.blocks.0.columns": ("Each of its blocks MUST have all columns", [[0, 1]]),
    "parts.0.blocks.2.columns": ("the `columns` of each block MUST be one of the table's `columns`", [[0, 2], [1, 3]]),
    "parts.0.blocks.2.encoding": ("its `encoding` MUST be the table's `dtype`", ["F16", "INT8"]),
    "kind": ("A **claim** always has `format` 1", ["claim"]),
}  # fmt: skip


def _place(entry: Entry, path: str) -> tuple[Any, Any]:
    """Return the object that has the last field of a path, and the field."""
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place: Any = entry
    for key in keys:
        place = place[key]
    return place, last


def _set(path: str, value: Any) -> Callable[[Stream], None]:
    """Return a change that sets a field of the entry 3; the value ``_MISSING`` removes it."""

    def change(stream: Stream) -> None:
        entry = stream.entry(3)
        place, last = _place(entry, path)
        if path == "parts.0.name" and isinstance(value, str) and re.fullmatch(r"[.a-zA-Z][\w./]*", value):
            stream.objects[value] = stream.objects[place[last]]  # a reader that follows the name finds the part
        if value is _MISSING:
            del place[last]
        else:
            place[last] = value
        stream.put_entry(3, entry)

    return change


def _upper(path: str) -> Callable[[Stream], None]:
    """Return a change that writes a hash of the entry 3 in capitals."""

    def change(entry: Entry) -> None:
        place, last = _place(entry, path)
        place[last] = place[last].upper()

    return lambda stream: stream.edit(3, change)


def _trial(make: Callable[[], Stream], change: Callable[[Stream], object], outcome: Outcome) -> Trial:
    stream = make()
    expected = stream.expected(3) if outcome is not Outcome.REFUSED else {}
    change(stream)
    return Trial(stream, outcome, expected)


def _fields() -> Iterator[Case]:
    for make, table in ((plain, _PLAIN), (owned, _OWNED)):
        number = 1 if make is plain else 2
        for path, (rule, values) in table.items():
            for value in values:
                text = "missing" if value is _MISSING else json.dumps(value)
                name = f"manifest format {number} {path} {text if len(text) < 100 else text[:90] + '...'}"
                yield Run(name, rule, partial(_trial, make, _set(path, value), Outcome.REFUSED))


def _text(edit: Callable[[str], str | bytes]) -> Callable[[Stream], None]:
    """Return a change of the text of entry 3."""

    def change(stream: Stream) -> None:
        text = stream.objects[entry_name(3)].decode()
        edited = edit(text)
        data = edited if isinstance(edited, bytes) else edited.encode()
        assert data != text.encode(), "the edit changes the text"
        stream.put_entry(3, data)

    return change


def _first(fields: str) -> Callable[[str], str]:
    """Return an edit that puts fields first."""
    return lambda text: "{" + fields + "," + text[1:]


def _sub(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, lambda _: replacement, text, count=1)


def _indented(text: str) -> str:
    return json.dumps(json.loads(text), indent="\r\n\t ")


def _with_unknown(text: str) -> str:
    """Add an unknown field to each object whose fields the format defines."""
    known = re.sub(r"\{(?=\"(format|num_rows|dtype|name|table|version)\")", '{"x-y":{"name":[]},', text)
    assert known.count("x-y") > 10
    return known


def _reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in sorted(value, reverse=True)}
    return [_reordered(each) for each in value] if isinstance(value, list) else value


_BAD_TEXTS: dict[str, tuple[str, Callable[[str], str | bytes]]] = {
    "empty": ("one JSON object", lambda _: ""),
    "an array": ("one JSON object", lambda text: f"[{text}]"),
    "null": ("one JSON object", lambda _: "null"),
    "two objects": ("one JSON object", lambda text: text + text),
    "text after it": ("one JSON object", lambda text: text + "x"),
    "a NUL after it": ("one JSON object", lambda text: text + "\0"),
    "truncated": ("one JSON object", lambda text: text[:-1]),
    "truncated in the middle": ("one JSON object", lambda text: text[: len(text) // 2]),
    "a comma too many": ("one JSON object", lambda text: text[:-1] + ",}"),
    "a comment": ("one JSON object", lambda text: text.replace(",", ",/**/", 1)),
    "single quotes": ("one JSON object", lambda text: text.replace('"format"', "'format'")),
    "an invalid escape": ("one JSON object", lambda text: text.replace('"format"', '"forma\\t","x":"\\x"')),
    "a control character": ("one JSON object", lambda text: text[:-1] + ',"x":"\n"}'),
    "invalid UTF-8": ("in UTF-8", lambda text: text[:-1].encode() + b',"x":"\xff"}'),
    "overlong UTF-8": ("in UTF-8", lambda text: text[:-1].encode() + b',"x":"\xc0\xaf"}'),
    "a surrogate in UTF-8": ("in UTF-8", lambda text: text[:-1].encode() + b',"x":"\xed\xa0\x80"}'),
    "UTF-16": ("in UTF-8", lambda text: text.encode("utf-16-le")),
    "above 64 MiB": ("at most 64 MiB", lambda text: text + " " * (1 << 26)),
    "a field twice": (_REJECT, _first('"version":3')),
    "an unknown field twice": (_REJECT, _first('"x":1,"x":1')),
    "a field twice by an escape": (_REJECT, _first(r'"versio\u006e":3')),
    "a table twice": (
        _REJECT,
        lambda text: text.replace('"tables":{', '"tables":{"t":{"num_rows":10,"dim":4,"dtype":"F32"},'),
    ),
    "a field of a table twice": (_REJECT, _sub('"dim":4', '"dim":4,"dim":4')),
    "a field of a block twice": (_REJECT, _sub('"num_rows":3', '"num_rows":3,"num_rows":3')),
    "a field of a part twice": (_REJECT, _sub('"parts":\\[\\{', '"parts":[{"dense":[],')),
    "a dense tensor twice": (_REJECT, _sub('"dense":\\{', '"dense":{"n":{"dtype":"I64","shape":[]},')),
    "a field of the parent twice": (_REJECT, _sub('"parent":\\{', '"parent":{"version":2,')),
    "a name twice inside an unknown field": (_REJECT, _first('"x":[{"y":{"a":1,"a":2}}]')),
    **{
        f"{name} of {number[:20]}": (_REJECT, _sub(rf'"{name}":[0-9.]+', f'"{name}":{number}'))
        for name in ("generation", "pending_rows", "cut", "created")
        for number in (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "01",
            "+1",
            ".5",
            "0x1",
            "1_0",
            "9" * 5000,
            "--1",
            "1.",
            "1e",
        )
    },
    **{
        f"{name} of {number}": (_COUNT, _sub(rf'"{name}":[0-9]+', f'"{name}":{number}'))
        for name in ("generation", "pending_rows", "num_bytes", "num_rows", "dim")
        for number in ("1.0", "1e0", "1E0", "10e-1", "0.0")
    },
    "NaN in an unknown field": (_REJECT, _first('"x":NaN')),
}

_GOOD_TEXTS: dict[str, tuple[str, Callable[[str], str | bytes]]] = {
    "with white space": ("one JSON object", _indented),
    "with its fields in another order": ("one JSON object", lambda text: json.dumps(_reordered(json.loads(text)))),
    "with escapes in names": (
        "one JSON object",
        lambda text: text.replace('"t"', r'"\u0074"').replace('"format"', r'"\u0066ormat"'),
    ),
    "with escaped slashes": ("one JSON object", lambda text: text.replace("parts/", "parts\\/")),
    "with an unknown field": (_UNKNOWN, _first('"x":[1,{"y":null,"z":-1.5e-3}]')),
    "with unknown fields everywhere": (_UNKNOWN, _with_unknown),
    "with unknown fields of format 2": (_UNKNOWN, _first('"event_time":-1,"training":"x","owners":[]')),
    "with forked_from": (
        "In all other entries, `forked_from` is an unknown field",
        _first('"forked_from":{"stream":1}'),
    ),
    "with an unknown name with a surrogate pair": (_UNKNOWN, _first('"\\ud83d\\ude00\U0001f600":"\\u0000"')),
    "with a long unknown string": (_UNKNOWN, _first('"x":"' + "a" * 300_000 + '"')),
    "with times in exponents": ("| `cut`, `created` | number |", _sub('"cut":[0-9.]+', '"cut":12.5E+2')),
    "with time 0": ("Readers MUST NOT assume: that times ascend", _sub('"cut":[0-9.]+', '"cut":0')),
    "with pending rows": (
        "changed rows left for later versions",
        _sub('"pending_rows":0', '"pending_rows":9223372036854775807'),
    ),
}

_EITHER_TEXTS: dict[str, tuple[str, Callable[[str], str | bytes]]] = {
    "with a deep unknown field": (_UNKNOWN, _first('"x":' + "[" * 5000 + "]" * 5000)),
    "with a very deep unknown field": (_UNKNOWN, _first('"x":' + "[" * 500_000 + "]" * 500_000)),
    "with deep unknown objects": (_UNKNOWN, _first('"x":' + '{"a":' * 500_000 + "1" + "}" * 500_000)),
    "with a number of 5,000 digits in an unknown field": (_UNKNOWN, _first('"x":' + "9" * 5000)),
    "with a byte order mark": ("in UTF-8", lambda text: "\ufeff" + text),
    "with a lone surrogate in an unknown field": (_UNKNOWN, _first('"x":"\\ud800"')),
    "with a minus zero": (_COUNT, _sub('"pending_rows":0', '"pending_rows":-0')),
}


def _texts() -> Iterator[Case]:
    for texts, outcome in (
        (_BAD_TEXTS, Outcome.REFUSED),
        (_GOOD_TEXTS, Outcome.RIGHT),
        (_EITHER_TEXTS, Outcome.RIGHT_OR_REFUSED),
    ):
        for name, (rule, edit) in texts.items():
            yield Run(f"manifest text {name}", rule, partial(_trial, plain, _text(edit), outcome))


def _others() -> Iterator[Case]:
    for path in ("parent.xxh3", "parts.0.xxh3"):
        trial = partial(_trial, plain, _upper(path), Outcome.REFUSED)
        yield Run(f"manifest format 1 {path} in capitals", "**hex** is 32 digits of `0-9a-f`", trial)
    for value in (3, 4, 2**64, 10**400):
        for make in (plain, owned):
            name = f"manifest format {str(value)[:30]} in a stream of format {1 if make is plain else 2}"
            yield Run(name, _NEWER, partial(_trial, make, _set("format", value), Outcome.NEWER))


def cases() -> Iterator[Case]:
    yield from _fields()
    yield from _texts()
    yield from _others()
