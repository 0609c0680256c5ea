"""Manifests that the format does not allow are refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from delta_tracker.errors import (
    MalformedError,
)
from delta_tracker.stream.format.parse import parse_manifest
from tests.stream.manifests import HASH, parsed, some_entry, some_manifest

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


@pytest.mark.promise("unpickled")
def test_mutated_manifests_are_refused_or_right() -> None:
    draw = random.Random(0)
    good = some_manifest().to_json()
    refused = 0
    for _ in range(3000):
        mutant = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.choice(b'0123456789{}[]",:.-aeE \xff\x00')
        try:
            read = parse_manifest("x", bytes(mutant))
        except MalformedError:
            refused += 1
        else:
            assert parse_manifest("x", read.to_json()) == read
    assert refused > 1000
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
