"""Manifests that the format does not allow are refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from msgspec import convert, to_builtins

from delta_tracker.errors import (
    MalformedError,
    NewerFormatError,
)
from delta_tracker.stream.format.manifest import Part, Stored
from delta_tracker.stream.format.parse import (
    load_json,
    parse_manifest,
)
from delta_tracker.types import TableStates
from tests.stream.manifests import HASH, parsed, some_entry, some_manifest, states_manifest

_LINK = {"version": 2, "xxh3": HASH}

_BAD_FIELDS: dict[str, Any] = {
    "format": [2, None, "1", True, 1.0],
    "stream": ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "0" * 32 + "\n", 0, None],
    "generation": [-1, True, 1.0, 2**63, "1"],
    "writer": ["../..", None],
    "version": [-1, None, 2, 4],
    "kind": ["full", None, [], "claim"],
    "parent": [None, {}, [], _LINK | {"version": 1}, _LINK | {"version": 3}, _LINK | {"xxh3": "00"}, "2"],
    "snapshot": [-1, 4, True, "1"],
    "batches": [[3, 2], [1], [0, 1, 2], None, [-1, 0]],
    "cut": [-1, "now", True, None, float("inf"), float("nan"), 10**400],
    "created": [-1, "now", True, None, float("inf"), float("nan"), 10**400],
    "pending_rows": [-1, None],
    "tables": [
        None,
        [],
        {"t": {}},
        {"t": {"num_rows": 10, "dim": 4, "dtype": "F99"}},
        {"t": {"num_rows": 10, "dim": 4, "dtype": "I64"}},
        {"t": {"num_rows": 10, "dim": 0, "dtype": "F32"}},
        {},
    ],
    "dense": [
        None,
        [],
        {},
        {"w": {"dtype": "F32", "shape": [3, 2]}},
        *({"w": {"dtype": "F32", "shape": shape}, "n": {"dtype": "I64", "shape": []}} for shape in (None, 3, [-1])),
        {"w": {"dtype": "F32", "shape": [2**31, 2**31]}, "n": {"dtype": "I64", "shape": []}},
        {"w": {"dtype": "F32", "shape": [0, 2**62, 2**62]}, "n": {"dtype": "I64", "shape": []}},
        {"w": {"dtype": "F32", "shape": [1] * 17}, "n": {"dtype": "I64", "shape": []}},
        {"w": {"dtype": "C64", "shape": [3, 2]}, "n": {"dtype": "I64", "shape": []}},
    ],
    "parts": [None, {}, [1]],
    "merges": [{}, _LINK, _LINK | {"version": 4}, 3],
}


def test_the_bad_fields_are_all_fields() -> None:
    assert _BAD_FIELDS.keys() == some_entry().keys()


@pytest.mark.promise("refused", "unpickled")
@pytest.mark.parametrize("field", _BAD_FIELDS)
def test_a_bad_field_is_refused(field: str) -> None:
    for value in _BAD_FIELDS[field]:
        with pytest.raises(MalformedError, match="log/3"):
            parsed(some_entry() | {field: value})
    entry = some_entry()
    del entry[field]
    with pytest.raises(MalformedError):
        parsed(entry)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../secret"),
        ("name", "parts/../../x.safetensors"),
        ("name", "/etc/passwd"),
        ("name", "parts/a/b.safetensors"),
        ("name", "parts/a.safetensors\n"),
        ("name", "log/1.json"),
        ("num_bytes", -1),
        ("xxh3", "00"),
        ("blocks", None),
        ("dense", None),
        ("dense", ["w"]),
        ("dense", ["w", "n", "n"]),
        ("dense", ["w", "other"]),
        ("dense", ["w", 1]),
    ],
)
def test_a_bad_part_is_refused(field: str, value: object) -> None:
    entry = some_entry()
    entry["parts"][0][field] = value
    with pytest.raises(MalformedError):
        parsed(entry)


@pytest.mark.parametrize(
    "blocks",
    [
        [{"rows": [0, 11]}],
        [{"columns": [0, 5]}],
        [{"columns": [2, 2]}],
        [{"num_rows": 11}],
        [{"num_rows": 9, "ids": "all"}],
        [{"table": "other"}],
        [{"ids": 1}],
        [{"ids": "some"}],
        [{"encoding": "F64"}],
        [{"encoding": None}],
        [{"encoding": "INT4", "columns": [0, 3]}],
        [{"rows": [0, 6]}, {"rows": [5, 10]}],
        [{}, {"ids": "gaps"}],
        [{}, {}],
    ],
    ids=str,
)
def test_blocks_outside_their_table_or_on_each_other_are_refused(blocks: list[dict[str, Any]]) -> None:
    good = {"table": "t", "rows": [0, 10], "columns": [0, 4], "num_rows": 3, "ids": "list", "encoding": "F32"}
    entry = some_entry()
    entry["parts"][0]["blocks"] = [good]
    parsed(entry)
    entry["parts"][0]["blocks"] = [good | block for block in blocks]
    with pytest.raises(MalformedError):
        parsed(entry)


def _states_entry() -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(states_manifest().to_json())
    return entry


def _changed(path: str, value: object) -> dict[str, Any]:
    """Return an entry of format 2 with another value at a path; the value ``_MISSING`` removes the field."""
    entry = _states_entry()
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place: Any = entry
    for key in keys:
        place = place[key]
    if value is _MISSING:
        del place[last]
    else:
        place[last] = value
    return entry


_MISSING = object()
_STORED = {"name": "parts/s.safetensors", "num_bytes": 66, "body": 50, "xxh3": HASH}
_IDENTITY = {"dtype": "I64", "hash_size": 1, "buckets": [{"rows": [0, 3], "default": 2}]}
_BAD_STATES_FIELDS: dict[str, list[object]] = {
    "event_time": [-1, "now", True, 2**53, _MISSING],
    "training": [None, {}, [1], [_STORED | {"num_bytes": 65}], [_STORED | {"name": "log/1.json"}], _MISSING],
    "tables.t.columns": [
        None, [], [[0, 3]], [[0, 3], [3, 5]], [[0, 3], [2, 4]], [[3, 4], [0, 3]], [[0, 4], [4, 4]], [[0, 0], [0, 4]],
        [[0, 2], [2, 4]], [[1, 4]], _MISSING,
    ],
    "tables.t.optimizer": [None, "", "adam", "A" * 65, 3, "ADAM\n", _MISSING],
    "tables.t.states": [
        None, {}, [1], [{}], [{"name": "x", "dtype": "F32"}], [{"name": "x", "dtype": "I64", "width": "range"}],
        [{"name": "X", "dtype": "F32", "width": "range"}], [{"name": "x", "dtype": "F32", "width": "rows"}],
        [{"name": "x", "dtype": "F32", "width": "range"}] * 2,
        [{"name": f"x{number}", "dtype": "F32", "width": "range"} for number in range(17)], [], _MISSING,
    ],
    "tables.t.identity": ["I64", 3, _IDENTITY | {"buckets": [{"rows": [0, 10], "default": None}]}, _MISSING],
    "tables.h.identity": [_IDENTITY | {"buckets": [{"rows": [0, 6], "default": None}]}],
    "tables.u.identity": [
        "I64", {}, True, [], _IDENTITY | {"dtype": "I32"}, _IDENTITY | {"hash_size": -1},
        _IDENTITY | {"hash_size": 2**63}, _IDENTITY | {"hash_size": None}, {"dtype": "I64", "hash_size": 1}, _MISSING,
        None,
    ],
    "tables.u.identity.buckets": [
        None, {}, [], [[0, 3]], [{"rows": [0, 3]}], [{"default": 1}], [{"rows": [0, 2], "default": None}],
        [{"rows": [0, 4], "default": None}], [{"rows": [1, 3], "default": None}], [{"rows": [0, 3], "default": 3}],
        [{"rows": [0, 3], "default": -1}], [{"rows": [0, 3], "default": 1.0}], [{"rows": [3, 0], "default": None}],
        [{"rows": [0, 2], "default": 1}, {"rows": [2, 3], "default": 1}],
        [{"rows": [0, 2], "default": 1}, {"rows": [2, 3], "default": None}],
        [{"rows": [0, 2], "default": None}, {"rows": [2, 3], "default": 2}],
        [{"rows": [0, 3], "default": None}, {"rows": [3, 3], "default": None}],
        [{"rows": [0, 2], "default": None}, {"rows": [1, 3], "default": None}],
        [{"rows": [0, 1], "default": None}, {"rows": [2, 3], "default": None}], _MISSING,
    ],
    "owners": [
        None, [], {"u": None}, {"u": {"admitted": 1}}, {"u": {"admitted": 1, "evicted": -1}},
        {"t": {"admitted": 1, "evicted": 1}}, {"x": {"admitted": 1, "evicted": 1}}, _MISSING,
    ],
    "parts.1.blocks.0.columns": [[0, 1], [1, 2]],
    "parts.1.blocks.0.encoding": ["F16", "INT8"],
    "tables.u.columns": [[[0, 1], [1, 2]]],
    "tables.u.states": [[{"name": "x", "dtype": "F32", "width": "range"}]],
    "parts.0.body": [0, 999, 1001, -1, None, 2**63, 2**63 - 1, _MISSING],
    "parts.0.num_bytes": [1000, 1015, 1017, 1032],
    "parts.0.states": [None, {}, _STORED | {"body": 0, "num_bytes": 0}, _STORED | {"xxh3": "00"}, _MISSING],
    "parts.1.states": [_STORED, _MISSING],
    "parts.0.blocks.0.columns": [[0, 4], [0, 2], [1, 3], [2, 3]],
    "parts.0.blocks.0.encoding": ["F16", "BF16", "INT8"],
    "kind": ["claim"],
}  # fmt: skip


@pytest.mark.promise("refused", "unpickled")
@pytest.mark.parametrize("path", _BAD_STATES_FIELDS)
def test_a_bad_field_of_format_2_is_refused(path: str) -> None:
    assert parsed(_states_entry()) == states_manifest()
    for value in _BAD_STATES_FIELDS[path]:
        with pytest.raises(MalformedError, match="log/3") as caught:
            parsed(_changed(path, value))
        assert not isinstance(caught.value, NewerFormatError)


def test_a_claim_has_format_1_in_every_stream() -> None:
    claim = _states_entry() | {"kind": "claim", "tables": {}, "dense": {}, "parts": [], "training": [], "owners": {}}
    with pytest.raises(MalformedError, match="a claim of format 2"):
        parsed(claim)
    parsed(claim | {"format": 1})


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("format", 3, "3"),
        ("format", 10**400, "10000"),
    ],
)
def test_an_entry_of_a_newer_format_needs_a_newer_release(path: str, value: object, found: str) -> None:
    with pytest.raises(NewerFormatError, match="Upgrade delta_tracker on this host") as caught:
        parsed(_changed(path, value))
    assert (caught.value.path, caught.value.known) == ("log/3", "formats 1 and 2")
    assert caught.value.found.startswith(found)
    assert len(str(caught.value)) < 1300


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.0, True, "2", None, [], {}])
def test_a_format_that_is_no_number_is_malformed(value: object) -> None:
    with pytest.raises(MalformedError) as caught:
        parsed(_changed("format", value))
    assert not isinstance(caught.value, NewerFormatError)


def test_the_fields_of_format_2_are_unknown_fields_in_format_1() -> None:
    entry = some_entry()
    entry["parts"][0]["body"] = entry["training"] = entry["tables"]["t"]["states"] = "anything"
    assert parsed(entry | {"event_time": -1}) == some_manifest()


def test_very_many_column_ranges_are_refused_early() -> None:
    entry = _states_entry()
    entry["tables"]["t"] |= {"dim": 66_000, "columns": [[number, number + 1] for number in range(66_000)]}
    with pytest.raises(MalformedError, match="length <= 65536"):
        parsed(entry)


def test_very_many_buckets_are_refused_early() -> None:
    entry = _states_entry()
    entry["tables"]["u"]["num_rows"] = 66_000
    buckets = [{"rows": [number, number + 1], "default": None} for number in range(66_000)]
    entry["tables"]["u"]["identity"]["buckets"] = buckets
    with pytest.raises(MalformedError, match="length <= 65536"):
        parsed(entry)


def test_records_in_messages_are_read_as_they_were_written() -> None:
    manifest = states_manifest()
    for states in manifest.states.values():
        assert convert(json.loads(json.dumps(to_builtins(states))), TableStates) == states
    for part in manifest.parts:
        assert convert(json.loads(json.dumps(asdict(part))), Part) == part
    for stored in manifest.training:
        assert convert(json.loads(json.dumps(asdict(stored))), Stored) == stored
    with pytest.raises(ValueError, match="body"):
        convert({"name": "parts/s.safetensors", "num_bytes": 66, "xxh3": HASH}, Stored)


@pytest.mark.promise("unpickled")
@pytest.mark.parametrize("format_", [1, 2])
def test_mutated_manifests_are_refused_or_right(format_: int) -> None:
    draw = random.Random(0)
    good = (some_manifest() if format_ == 1 else states_manifest()).to_json()
    refused = 0
    for _ in range(3000 if format_ == 1 else 1000):
        mutant = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.choice(b'0123456789{}[]",:.-aeE \xff\x00')
        if draw.random() < 0.3:  # also names that are there twice
            begin, place = draw.randrange(len(mutant)), draw.randrange(len(mutant))
            mutant[place:place] = mutant[begin : begin + draw.randrange(1, 60)]
        try:
            read = parse_manifest("x", bytes(mutant))
        except MalformedError:
            refused += 1
        else:
            load_json(bytes(mutant))  # a parser that knows no schema accepts it too
            assert parse_manifest("x", read.to_json()) == read
    assert refused > (1000 if format_ == 1 else 300)
    for garbage in (
        good.replace(b"{", b'{"version":3,', 1),
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b"\xff\xfe",
        b"9" * 5000,
        good.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + good,
    ):
        with pytest.raises(MalformedError):
            parse_manifest("x", garbage)


def test_an_error_has_the_path_of_the_field() -> None:
    entry = some_entry()
    entry["parts"][0]["blocks"][1]["num_rows"] = 1.0
    with pytest.raises(MalformedError, match=re.escape("$.parts[0].blocks[1].num_rows")):
        parsed(entry)


def test_an_error_quotes_a_limited_amount_of_text() -> None:
    with pytest.raises(MalformedError) as caught:
        parsed(some_entry() | {"kind": "x" * 1_000_000})
    assert len(str(caught.value)) < 2000


def test_a_manifest_of_very_many_blocks_costs_no_memory() -> None:
    entry = some_entry()
    entry["tables"]["t"] = {"num_rows": 60_000, "dim": 60_000, "dtype": "F32"}
    entry["parts"][0]["blocks"] = [
        {"table": "t", "rows": [i, i + 1], "columns": [i, i + 1], "num_rows": 0, "ids": "list", "encoding": "F32"}
        for i in range(20_000)
    ]
    with pytest.raises(MalformedError, match="too many"):
        parsed(entry)


def test_very_many_large_blocks_are_counted_without_visiting_their_cells() -> None:
    """Each block covers four million cells; visiting every cell would take hours."""
    entry = some_entry()
    entry["tables"]["t"] = {"num_rows": 60_000, "dim": 60_000, "dtype": "F32"}
    rest = {"table": "t", "num_rows": 0, "ids": "list", "encoding": "F32"}
    cuts = [rest | {"rows": [i, i + 1], "columns": [i, i + 1]} for i in range(1990)]
    entry["parts"][0]["blocks"] = cuts + 100_000 * [rest | {"rows": [0, 60_000], "columns": [0, 60_000]}]
    with pytest.raises(MalformedError, match="overlap"):
        parsed(entry)


class _Waiting(threading.Thread):
    """A thread that needs the interpreter lock again and again, like one that looks up rows.

    Attributes:
        longest: CPU time in seconds that the thread that created it worked during the longest wait for the lock.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ended = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        before = time.clock_gettime(self._clock)
        while not self._ended.wait(0.0005):
            now = time.clock_gettime(self._clock)
            self.longest, before = max(self.longest, now - before), now

    def during(self, work: Callable[[], object]) -> float:
        self.start()
        work()
        self._ended.set()
        self.join()
        return self.longest


def _with_unknown(unit: str, num_bytes: int) -> bytes:
    """Return an entry with a long array in a field that readers ignore."""
    array = ",".join([unit] * (num_bytes // (len(unit) + 1)))
    return json.dumps(some_entry()).encode()[:-1] + f',"more":[{array}]}}'.encode()


def _plausible(num_tables: int, num_ranks: int) -> bytes:
    """Return the entry of a snapshot of tables that are sharded by rows over ranks."""
    names = [f"sparse.ec.embedding_bags.table_{number}" for number in range(num_tables)]
    tables = {name: {"num_rows": 1000 * num_ranks, "dim": 128, "dtype": "F32"} for name in names}
    end = {"num_rows": 1000, "ids": "all", "encoding": "F32"}
    parts = [
        {
            "name": f"parts/00000000000000000003-g1-r{rank}-0123456789abcdef.safetensors",
            "num_bytes": 1 << 30,
            "xxh3": HASH,
            "blocks": [
                {"table": name, "rows": [1000 * rank, 1000 * rank + 1000], "columns": [0, 128], **end} for name in names
            ],
            "dense": [],
        }
        for rank in range(num_ranks)
    ]
    entry = some_entry() | {"kind": "snapshot", "snapshot": 3, "tables": tables, "dense": {}, "parts": parts}
    return json.dumps(entry, separators=(",", ":")).encode()


@pytest.mark.parametrize("unit", ["[]", "[[[[0]]]]"])
def test_a_lookup_waits_briefly_while_a_manifest_is_parsed(unit: str) -> None:
    data = _with_unknown(unit, 2_000_000)
    assert _Waiting().during(lambda: parse_manifest("x", data)) < 0.4  # seconds; 0.01 on a quiet core


def test_a_manifest_of_many_tables_and_ranks_is_read() -> None:
    data = _plausible(1000, 64)
    assert 8_000_000 < len(data) < 10_000_000
    read = parse_manifest("x", data)
    assert (len(read.tables), len(read.parts), sum(len(part.blocks) for part in read.parts)) == (1000, 64, 64_000)


@pytest.mark.parametrize("field", ["more", "parts", "tables"])
@pytest.mark.parametrize("unit", ["[]", "{}", '{"a":"b"}'])
def test_a_manifest_needs_little_memory_until_it_is_known_to_be_right(field: str, unit: str) -> None:
    if field == "more":
        data = _with_unknown(unit, 300_000)
    elif field == "parts":
        data = _plausible(1, 1).replace(b'"parts":[', b'"parts":[' + f"{unit},".encode() * (300_000 // len(unit)))
    else:
        many = ",".join(f'"t{number}":{unit}' for number in range(20_000))
        data = _plausible(1, 1).replace(b'"tables":{', b'"tables":{' + many.encode() + b",")
    tracemalloc.start()
    try:
        parse_manifest("x", data)
    except MalformedError:
        assert field != "more"
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 12 * len(data)


@pytest.mark.parametrize(("field", "unit"), [("blocks", "1"), ("blocks", "{}"), ("dense", '""'), ("dense", '"a"')])
def test_the_first_invalid_element_of_a_manifest_ends_the_work(field: str, unit: str) -> None:
    good, opening = _plausible(1, 1), f'"{field}":['.encode()
    place = good.rindex(opening) + len(opening)
    many = ",".join([unit] * (300_000 // len(unit)))
    data = good[:place] + many.encode() + (b"" if good[place : place + 1] == b"]" else b",") + good[place:]
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            parse_manifest("x", data)
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 3 * len(data)


_NAMES_TWICE = [
    '{"a":1,"a":2}',
    '{"a":{},"b":[],"a":2}',
    '{"a":"}","\\u0061":2}',
    '[[{"\\"":1 , "\\u0022"\n:2}]]',
    '{"b":{"b":{"c":1},"c":"b","b":0}}',
]
_NAMES_ONCE = ['{"a":"a"}', '{"a":["b","a"],"b":{"a":{"a":"a"}}}', '{"":{"":{}}}', '[{"a":1},{"a":2}]', '"\\"a\\":"']


@pytest.mark.parametrize("value", _NAMES_TWICE)
def test_a_name_twice_in_an_unknown_field_is_refused(value: str) -> None:
    text = json.dumps(some_entry())[:-1] + f',"more":{value}}}'
    with pytest.raises(MalformedError, match="twice"):
        parse_manifest("x", text.encode())


@pytest.mark.parametrize("separators", [(",", ":"), (", ", " : ")])
@pytest.mark.parametrize("field", ["format", "num_rows", "dtype", "shape", "xxh3", "columns", "w"])
def test_a_field_twice_is_refused(field: str, separators: tuple[str, str]) -> None:
    good = json.dumps(some_entry(), separators=separators)
    fields = list(re.finditer(rf'"{field}" ?: ?(?:\[.*?\]|\{{.*?\}}|"[^"]*"|[0-9]+)(?=[,}}])', good))
    assert fields
    for each in fields:
        text = f"{good[: each.start()]}{each[0]},{good[each.start() :]}"
        with pytest.raises(MalformedError, match="twice"):
            parse_manifest("x", text.encode())


@pytest.mark.parametrize("value", _NAMES_ONCE)
def test_unknown_fields_are_ignored(value: str) -> None:
    good = json.dumps(some_entry())
    for text in (good[:-1] + f',"more":{value}}}', good.replace('"table":', f'"more":{value}, "table":')):
        assert parse_manifest("x", text.encode()) == some_manifest()
