"""Manifests, parts and the log: what they refuse, and who wins."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from delta_tracker.errors import (
    CorruptPartError,
    FencedError,
    MalformedError,
    MissingVersionError,
    StorageError,
    StreamError,
)
from delta_tracker.stream.codec import Rows, decode, encode
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.manifest import Block, Manifest, Part
from delta_tracker.stream.storage import Storage
from delta_tracker.types import TableSpec
from tests.streams import FQN, Writer

_TABLE = TableSpec("t", 10, 4, torch.float32)
_TABLES = {"t": _TABLE, "h": TableSpec("h", 6, 8, torch.bfloat16)}


def _rows() -> list[Rows]:
    return [
        Rows(Block("h", (0, 6), (0, 8), 6, whole=True), None, torch.randn(6, 8).bfloat16()),
        Rows(Block("t", (5, 10), (0, 4), 2, whole=False), torch.tensor([5, 9]), torch.randn(2, 4)),
        Rows(Block("t", (0, 5), (0, 4), 0, whole=False), torch.empty(0, dtype=torch.int64), torch.empty(0, 4)),
    ]


def _encoded(rows: list[Rows]) -> tuple[Part, np.ndarray[Any, Any]]:
    part, buffers = encode(rows, "parts/p.safetensors")
    return part, np.frombuffer(b"".join(buffers), dtype=np.uint8).copy()


def test_a_part_is_read_as_it_was_written() -> None:
    rows = _rows()
    part, data = _encoded(rows)
    assert part.num_bytes == len(data)
    for wrote, read in zip(rows, decode(part, data, _TABLES), strict=True):
        assert wrote.block == read.block
        assert torch.equal(wrote.values, read.values)
        assert wrote.values.dtype == read.values.dtype
        assert (wrote.ids is None) == (read.ids is None)
        assert wrote.ids is None or torch.equal(wrote.ids, read.ids)


def test_a_part_is_a_safetensors_file() -> None:
    rows = _rows()
    _, data = _encoded(rows)
    tensors = safetensors.torch.load(data.tobytes())
    assert sorted(tensors) == ["0.values", "1.ids", "1.values", "2.ids", "2.values"]
    assert torch.equal(tensors["1.ids"], rows[1].ids)
    assert torch.equal(tensors["0.values"], rows[0].values)


def test_a_column_slice_is_written_compactly() -> None:
    wide = torch.randn(3, 8)
    rows = [Rows(Block("h", (0, 3), (4, 8), 3, whole=True), None, wide[:, 4:])]
    part, data = _encoded(rows)
    tables = {"h": TableSpec("h", 3, 8, torch.float32)}
    assert torch.equal(decode(part, data, tables)[0].values, wide[:, 4:])


@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "flipped", "empty"])
def test_damaged_bytes_are_refused(change: str) -> None:
    part, data = _encoded(_rows())
    damaged = {
        "missing": None,
        "shorter": data[:-1],
        "longer": np.append(data, 0).astype(np.uint8),
        "flipped": np.bitwise_xor(data, np.eye(1, len(data), len(data) // 2, dtype=np.uint8)[0]),
        "empty": data[:0],
    }[change]
    with pytest.raises(CorruptPartError, match=r"parts/p\.safetensors") as caught:
        decode(part, damaged, _TABLES)
    assert caught.value.path == part.name


@pytest.mark.parametrize("ids", [[9, 5], [5, 5], [4, 9], [5, 10], [-1, 5]])
def test_ids_out_of_order_or_range_are_refused(ids: list[int]) -> None:
    rows = [Rows(Block("t", (5, 10), (0, 4), 2, whole=False), torch.tensor(ids), torch.randn(2, 4))]
    part, data = _encoded(rows)
    with pytest.raises(CorruptPartError, match="ids of table 't'"):
        decode(part, data, _TABLES)


def test_a_part_that_is_not_what_its_record_says_is_refused() -> None:
    rows = _rows()
    part, data = _encoded(rows)
    with pytest.raises(CorruptPartError, match="instead of"):
        decode(part, data, {**_TABLES, "t": replace(_TABLE, dtype=torch.float16)})
    other = replace(part, blocks=part.blocks[:1])
    with pytest.raises(CorruptPartError, match="it holds the tensors"):
        decode(other, data, _TABLES)


def test_bytes_that_no_tensor_claims_are_refused() -> None:
    part, data = _encoded(_rows())
    longer = np.append(data, np.zeros(8, dtype=np.uint8))
    with pytest.raises(CorruptPartError, match="8 bytes after its last tensor"):
        decode(replace(part, num_bytes=len(longer), xxh3=_xxh3(longer)), longer, _TABLES)


def test_mutated_parts_are_refused_or_right() -> None:
    """With a fitting hash and size, so that the layout's own checks are reached."""
    draw = random.Random(0)
    _, data = _encoded(_rows())
    refused = 0
    for _ in range(2000):
        mutant = data.copy()
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(min(len(mutant), 500))] = draw.randrange(256)
        if draw.random() < 0.3:
            mutant = mutant[: draw.randrange(len(mutant))]
        part, _ = encode(_rows(), "parts/p.safetensors")
        part = replace(part, num_bytes=len(mutant), xxh3=_xxh3(mutant))
        try:
            read = decode(part, mutant, _TABLES)
        except CorruptPartError:
            refused += 1
        else:
            for rows, block in zip(read, part.blocks, strict=True):
                assert rows.values.shape == (block.num_rows, block.columns[1] - block.columns[0])
                assert rows.values.dtype == _TABLES[block.table].dtype
                ids = range(*block.rows) if rows.ids is None else rows.ids.tolist()
                assert sorted(set(ids)) == list(ids)
                assert set(ids) <= set(range(*block.rows))
    assert refused > 1000


def _xxh3(data: np.ndarray[Any, Any]) -> str:
    import xxhash  # noqa: PLC0415

    return xxhash.xxh3_128_hexdigest(data.tobytes())


def _manifest() -> Manifest:
    part, _ = encode(_rows(), "parts/p.safetensors")
    return Manifest(
        stream="0" * 32,
        generation=1,
        writer="f" * 32,
        version=3,
        kind="delta",
        batches=(2, 5),
        created=1.5,
        tables=_TABLES,
        parts=(part,),
    )


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = _manifest()
    assert Manifest.from_json("x", manifest.to_json()) == manifest
    assert (manifest.num_rows, manifest.num_bytes) == (8, manifest.parts[0].num_bytes)


_BAD_FIELDS: dict[str, Any] = {
    "format": [2, None, "1", True, 1.0],
    "stream": ["", "g" * 32, 0, None],
    "generation": [-1, True, 1.0, 2**63, "1"],
    "writer": ["../..", None],
    "version": [-1, None],
    "kind": ["full", None, [], "claim"],
    "batches": [[3, 2], [1], [0, 1, 2], None, [-1, 0]],
    "created": [-1, "now", True, None, float("inf"), float("nan"), 10**400],
    "pending_rows": [-1, None],
    "tables": [None, [], {"t": {}}, {"t": {"num_rows": 10, "dim": 4, "dtype": "F99"}}, {}],
    "parts": [None, {}, [1]],
}


@pytest.mark.parametrize("field", _BAD_FIELDS)
def test_a_bad_field_is_refused(field: str) -> None:
    for value in _BAD_FIELDS[field]:
        entry = json.loads(_manifest().to_json())
        entry[field] = value
        with pytest.raises(MalformedError, match="log/3"):
            Manifest.from_json("log/3", json.dumps(entry).encode())
    entry = json.loads(_manifest().to_json())
    del entry[field]
    with pytest.raises(MalformedError):
        Manifest.from_json("log/3", json.dumps(entry).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../secret"),
        ("name", "parts/../../x.safetensors"),
        ("name", "/etc/passwd"),
        ("name", "parts/a/b.safetensors"),
        ("name", "log/1.json"),
        ("num_bytes", -1),
        ("xxh3", "00"),
        ("blocks", None),
    ],
)
def test_a_bad_part_is_refused(field: str, value: object) -> None:
    entry = json.loads(_manifest().to_json())
    entry["parts"][0][field] = value
    with pytest.raises(MalformedError):
        Manifest.from_json("log/3", json.dumps(entry).encode())


@pytest.mark.parametrize(
    "blocks",
    [
        [{"rows": [0, 11]}],
        [{"columns": [0, 5]}],
        [{"num_rows": 11}],
        [{"num_rows": 9, "whole": True}],
        [{"table": "other"}],
        [{"whole": 1}],
        [{"rows": [0, 6]}, {"rows": [5, 10]}],
        [{}, {}],
    ],
    ids=str,
)
def test_blocks_outside_their_table_or_on_each_other_are_refused(blocks: list[dict[str, Any]]) -> None:
    good = {"table": "t", "rows": [0, 10], "columns": [0, 4], "num_rows": 3, "whole": False}
    entry = json.loads(_manifest().to_json())
    entry["parts"][0]["blocks"] = [good | block for block in blocks]
    with pytest.raises(MalformedError):
        Manifest.from_json("log/3", json.dumps(entry).encode())


def test_a_snapshot_holds_every_row_once() -> None:
    def snapshot(*blocks: tuple[tuple[int, int], tuple[int, int], bool]) -> bytes:
        entry = json.loads(_manifest().to_json())
        entry["kind"] = "snapshot"
        del entry["tables"]["h"]
        entry["parts"][0]["blocks"] = [
            {"table": "t", "rows": rows, "columns": columns, "num_rows": rows[1] - rows[0], "whole": whole}
            for rows, columns, whole in blocks
        ]
        return json.dumps(entry).encode()

    Manifest.from_json("x", snapshot(((0, 10), (0, 4), True)))
    Manifest.from_json("x", snapshot(((0, 5), (0, 4), True), ((5, 10), (0, 2), True), ((5, 10), (2, 4), True)))
    for blocks in (
        (((0, 9), (0, 4), True),),
        (((0, 10), (0, 3), True),),
        (((0, 10), (0, 4), False),),
        (((0, 5), (0, 4), True), ((5, 10), (0, 2), True)),
        (((0, 5), (0, 4), True), ((5, 10), (0, 4), True), ((5, 10), (2, 4), True)),
    ):
        with pytest.raises(MalformedError):
            Manifest.from_json("x", snapshot(*blocks))


def test_mutated_manifests_are_refused_or_right() -> None:
    draw = random.Random(0)
    good = _manifest().to_json()
    refused = 0
    for _ in range(3000):
        mutant = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.choice(b'0123456789{}[]",:.-aeE \xff\x00')
        try:
            read = Manifest.from_json("x", bytes(mutant))
        except MalformedError:
            refused += 1
        else:
            assert Manifest.from_json("x", read.to_json()) == read
    assert refused > 1000
    for garbage in (b"", b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe"):
        with pytest.raises(MalformedError):
            Manifest.from_json("x", garbage)


def test_versions_are_dense_and_claims_are_versions() -> None:
    writer = Writer(Storage("memory://"))
    assert (writer.claim.head.version, writer.claim.head.generation, writer.claim.head.kind) == (0, 1, "claim")
    assert [writer.snapshot().version, writer.delta([1]).version, writer.delta([2]).version] == [1, 2, 3]
    log = StreamLog(writer.storage)
    assert log.versions() == [0, 1, 2, 3]
    assert log.versions(after=2) == [3]
    assert [log.read(version).kind for version in log.versions()] == ["claim", "snapshot", "delta", "delta"]
    assert log.read(4) is None
    assert log.head() == writer.claim.head
    assert {log.read(version).stream for version in log.versions()} == {writer.claim.head.stream}


def test_a_second_claim_fences_the_first() -> None:
    storage = Storage("memory://")
    first = Writer(storage)
    first.snapshot()
    second = Writer(storage)
    assert second.claim.head.generation == 2
    before = StreamLog(storage).versions()
    for _ in range(2):  # for good, also when it tries again
        with pytest.raises(FencedError) as caught:
            first.delta([1])
        assert (caught.value.generation, caught.value.owner) == (1, 2)
    assert StreamLog(storage).versions() == before
    second.snapshot()
    assert StreamLog(storage).newest_snapshot() == second.claim.head


class _LosesAnswers(Storage):
    """A store whose answers get lost after the object was written."""

    loses = False

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        if self.loses:
            raise StorageError(self.url, "connection reset")
        return created


def test_a_commit_whose_answer_was_lost_has_won() -> None:
    storage = _LosesAnswers("memory://")
    writer = Writer(storage)
    storage.loses = True
    assert writer.snapshot().version == 1
    assert writer.delta([3]).version == 2


class _LosesAnswersAndReads(_LosesAnswers):
    def read(self, name: str, **kwargs: Any) -> Any:
        if self.loses:
            raise StorageError(self.url, "connection reset")
        return super().read(name, **kwargs)


def test_a_commit_of_unknown_outcome_is_followed_by_the_next_one() -> None:
    storage = _LosesAnswersAndReads("memory://")
    writer = Writer(storage)
    writer.snapshot()
    storage.loses = True
    with pytest.raises(StorageError):
        writer.delta([3])
    storage.loses = False
    assert writer.delta([3]).version == 3
    assert StreamLog(storage).versions() == [0, 1, 2, 3]


def test_a_log_with_a_hole_is_refused_and_strangers_are_passed_over() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    writer.snapshot()
    skipping = copy.copy(writer.claim)
    skipping._head = replace(skipping._head, version=4)
    writer.claim = skipping
    writer.delta([1])
    with pytest.raises(MissingVersionError) as caught:
        StreamLog(storage).newest_snapshot()
    assert (caught.value.version, caught.value.head) == (4, 5)
    for name in ("log/hello.json", "log/.DS_Store", "log/1.json", f"log/{'9' * 21}.json"):
        storage.create(name, b"{}")
    assert StreamLog(storage).versions() == [0, 1, 5]


def test_an_entry_that_lies_about_its_version_is_refused() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    storage.create("log/00000000000000000001.json", writer.claim.head.to_json())
    with pytest.raises(MalformedError, match="version 0"):
        StreamLog(storage).read(1)


def test_every_error_of_a_stream_is_a_stream_error() -> None:
    for kind in (CorruptPartError, FencedError, MalformedError, MissingVersionError, StorageError):
        assert issubclass(kind, StreamError)


def test_the_table_of_the_writer_is_what_a_reader_gets() -> None:
    writer = Writer(Storage("memory://"))
    manifest = writer.delta([3, 4])
    part = manifest.parts[0]
    (rows,) = decode(part, writer.storage.read(part.name, max_bytes=part.num_bytes), manifest.tables)
    assert rows.block.table == FQN
    assert torch.equal(rows.values, writer.table[[3, 4]])


def test_an_entry_that_no_reader_would_accept_is_never_committed() -> None:
    writer = Writer(Storage("memory://"))
    block = Block(FQN, (0, 20), (0, 4), 2, whole=False)
    rows = Rows(block, torch.tensor([1, 2]), torch.zeros(2, 4))
    with pytest.raises(MalformedError, match="overlap"):
        writer.write("delta", [rows, rows])
    with pytest.raises(MalformedError, match="does not hold all"):
        writer.write("snapshot", [rows])
    assert StreamLog(writer.storage).versions() == [0]
    assert writer.snapshot().version == 1


def test_a_manifest_of_very_many_blocks_costs_no_memory() -> None:
    entry = json.loads(_manifest().to_json())
    entry["tables"]["t"] = {"num_rows": 60_000, "dim": 60_000, "dtype": "F32"}
    entry["parts"][0]["blocks"] = [
        {"table": "t", "rows": [i, i + 1], "columns": [i, i + 1], "num_rows": 0, "whole": False} for i in range(20_000)
    ]
    with pytest.raises(MalformedError, match="too many"):
        Manifest.from_json("x", json.dumps(entry).encode())
