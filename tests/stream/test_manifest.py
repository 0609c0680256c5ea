"""Manifests are read as they were written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash

from delta_tracker.errors import (
    MalformedError,
)
from delta_tracker.stream.format.manifest import Link, Manifest, Stored
from delta_tracker.stream.format.parse import parse_manifest
from tests.stream.manifests import HASH, parsed, some_entry, some_manifest, states_manifest


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = some_manifest()
    read = parse_manifest("x", manifest.to_json())
    assert read == manifest
    assert read.xxh3 == xxhash.xxh3_128_hexdigest(manifest.to_json())
    assert read.link == Link(3, read.xxh3)
    assert (manifest.num_rows, manifest.num_bytes) == (8, 1000)


def test_an_entry_names_its_parts_their_states_and_the_training_states() -> None:
    manifest = some_manifest()
    (part,) = manifest.parts
    states, training = Stored("parts/s.safetensors", 200, 184, HASH), Stored("parts/t.safetensors", 30, 14, HASH)
    parts = (replace(part, states=states), part)
    assert manifest.objects == (part,)
    assert replace(manifest, parts=parts, training=(training,)).objects == (*parts, states, training)
    assert replace(manifest, parts=parts, training=(training,)).total_bytes == 2230
    assert replace(manifest, parts=parts, training=(training,)).num_bytes == 2000


def test_format_1_has_the_fields_of_format_1() -> None:
    """The fields of format 2 are not written, so that older releases and frozen bytes agree."""
    assert list(some_entry()) == [
        "format", "stream", "generation", "writer", "version", "kind", "snapshot", "batches", "cut", "created",
        "pending_rows", "parent", "merges", "tables", "dense", "parts",
    ]  # fmt: skip
    assert list(some_entry()["parts"][0]) == ["name", "num_bytes", "xxh3", "blocks", "dense"]
    assert list(some_entry()["tables"]["t"]) == ["num_rows", "dim", "dtype"]


def test_identities_are_written_for_tables_with_raw_ids() -> None:
    entry = json.loads(states_manifest().to_json())
    buckets = [{"rows": [0, 2], "default": 1}, {"rows": [2, 3], "default": 2}]
    identity = {"dtype": "I64", "hash_size": 100, "buckets": buckets}
    assert [table["identity"] for table in entry["tables"].values()] == [None, None, identity]
    assert entry["owners"] == {"u": {"admitted": 2, "evicted": 1}}
    assert (entry["format"], list(entry)[-2:]) == (2, ["training", "owners"])
    assert "draft" not in entry


def test_a_merged_manifest_links_to_the_last_version_that_it_stands_for() -> None:
    merged = replace(some_manifest(), parent=Link(0, HASH), merges=Link(3, "e" * 32))
    read = parse_manifest("x", merged.to_json())
    assert read == merged
    assert read.link == Link(3, "e" * 32)


def test_a_snapshot_holds_every_row_once() -> None:
    def snapshot(*blocks: tuple[tuple[int, int], tuple[int, int], bool]) -> Manifest:
        entry = some_entry() | {"kind": "snapshot", "snapshot": 3}
        del entry["tables"]["h"]
        entry["parts"][0]["blocks"] = [
            {
                "table": "t",
                "rows": rows,
                "columns": columns,
                "num_rows": rows[1] - rows[0],
                "ids": "all" if is_whole else "list",
                "encoding": "F32",
            }
            for rows, columns, is_whole in blocks
        ]
        return parsed(entry)

    snapshot(((0, 10), (0, 4), True))
    snapshot(((0, 5), (0, 4), True), ((5, 10), (0, 2), True), ((5, 10), (2, 4), True))
    # Rows that changed while the others were copied are in separate blocks.
    snapshot(((0, 10), (0, 4), True), ((0, 10), (0, 4), False))
    for blocks in (
        (((0, 9), (0, 4), True),),
        (((0, 10), (0, 3), True),),
        (((0, 10), (0, 4), False),),
        (((0, 5), (0, 4), True), ((5, 10), (0, 2), True)),
        (((0, 5), (0, 4), True), ((5, 10), (0, 4), True), ((5, 10), (2, 4), True)),
        (((0, 10), (0, 4), True), ((0, 6), (0, 4), False), ((5, 10), (0, 4), False)),
    ):
        with pytest.raises(MalformedError):
            snapshot(*blocks)


def test_a_snapshot_is_the_newest_one() -> None:
    entry = json.loads(replace(some_manifest(), tables={}, dense={}, parts=()).to_json()) | {"kind": "snapshot"}
    parsed(entry | {"snapshot": 3})
    for snapshot in (None, 1, 2):
        with pytest.raises(MalformedError, match="newest"):
            parsed(entry | {"snapshot": snapshot})
