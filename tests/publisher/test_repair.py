"""Rows to republish after a restart: the rows of later versions, or every row where those are unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_tracker.errors import LostEntryError
from delta_tracker.publisher.repair import rows_to_repair
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.position import Position
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, ShardSpec
from tests.stream.streams import FQN, Writer


def _repair(writer: Writer, note: object, shard: ShardSpec | None = None) -> dict[str, list[int]] | None:
    claim = StreamLog(writer.storage).claim().head
    spec = ShardSpec(writer.spec, 0, 20, ((0, 4),)) if shard is None else shard
    rows = rows_to_repair(StreamLog(writer.storage), note, claim, (1, {FQN: writer.spec}, {}, {}), {FQN: spec})
    return None if rows is None else {fqn: ids.tolist() for fqn, ids in rows.items()}


def _position(writer: Writer) -> dict[str, str | int]:
    return Position.after(writer.claim.head).to_dict()


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    writer.delta([3])
    return writer


def test_rows_of_later_versions_are_repaired(writer: Writer) -> None:
    note = _position(writer)
    assert _repair(writer, note) == {}
    writer = _again(writer)
    writer.delta([5, 19])
    writer.delta([2, 5])
    assert _repair(writer, note) == {FQN: [2, 5, 19]}
    writer = _again(writer)
    writer.delta([7])
    # Two generations later, from the same old checkpoint; and one rank republishes its own rows only.
    assert _repair(writer, note) == {FQN: [2, 5, 7, 19]}
    assert _repair(writer, note, ShardSpec(writer.spec, 5, 3, ((0, 4),))) == {FQN: [0, 2]}


def _again(writer: Writer) -> Writer:
    again = Writer(writer.storage)
    again.table = writer.table
    return again


def test_every_row_is_sent_if_the_changed_rows_are_unknown(writer: Writer) -> None:
    note = _position(writer)
    for other in (None, {}, "x", note | {"stream": "0" * 32}, note | {"xxh3": "0" * 32}, note | {"version": 10**6}):
        assert _repair(writer, other) is None
    writer = _again(writer)
    gone = writer.delta([5])
    writer.delta([6])
    content = writer.storage.read(entry_name(gone.version), max_bytes=1 << 20)
    part = writer.storage.read(gone.parts[0].name, max_bytes=1 << 20)
    assert content is not None
    assert part is not None
    writer.storage.delete(gone.parts[0].name)
    assert _repair(writer, note) is None
    writer.storage.put(gone.parts[0].name, [memoryview(part)])
    assert _repair(writer, note) == {FQN: [5, 6]}
    writer.storage.delete(entry_name(gone.version))
    assert _repair(writer, note) is None
    writer.storage.create(entry_name(gone.version), content.tobytes())
    again = _again(writer)
    again.snapshot()
    assert _repair(again, note) is None


def test_every_row_is_sent_if_readers_cannot_reach_the_position_from_a_snapshot(writer: Writer) -> None:
    """Another program deleted the newest entry, and the trainer ended before it had published a snapshot."""
    lost = writer.delta([5])
    note = _position(writer)
    writer.storage.delete(entry_name(lost.version))
    with pytest.raises(LostEntryError):
        writer.delta([6])
    assert _repair(writer, note) is None


def test_a_quantized_stream_is_repaired_by_its_ids() -> None:
    writer = Writer(Storage("memory://"), encoding=Encoding.INT8)
    writer.snapshot()
    note = _position(writer)
    writer.delta([1, 4])
    assert _repair(writer, note) == {FQN: [1, 4]}


def test_every_row_is_sent_if_the_buckets_of_raw_ids_changed() -> None:
    identity = Identity(100, (Bucket((0, 20), 19),))
    writer = Writer(Storage("memory://"), identity=identity)
    writer.snapshot()
    note = _position(writer)
    writer.delta([3])
    spec = ShardSpec(writer.spec, 0, 20, ((0, 4),))
    claim = StreamLog(writer.storage).claim().head
    for identities, expected in (({FQN: identity}, [3]), ({FQN: replace(identity, hash_size=99)}, None), ({}, None)):
        schema = (2, {FQN: writer.spec}, {}, identities)
        rows = rows_to_repair(StreamLog(writer.storage), note, claim, schema, {FQN: spec})
        assert (None if rows is None else rows[FQN].tolist()) == expected
