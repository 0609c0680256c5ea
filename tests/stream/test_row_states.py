"""Streams of format 2: rows with states, objects that are read in ranges, and training states."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import CorruptPartError, NewerFormatError
from delta_tracker.stream.format import digests as digests_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, Manifest, Part, Stored, entry_name
from delta_tracker.stream.format.object_reader import MEMORY_BYTES, Ranged
from delta_tracker.stream.format.part_reader import PartReader, read_parts, read_training
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableSpec, TableStates
from tests.stores.wrapped import WrappedStorage
from tests.stream import states_stream
from tests.stream.golden import reader as page
from tests.stream.states_stream import same_tree
from tests.stream.streams import FQN, Writer

STATES = TableStates(
    "EXACT_ROWWISE_ADAGRAD",
    ((0, 3), (3, 4)),
    (StateSpec("sum", torch.float32, "range"), StateSpec("exp_avg", torch.bfloat16, "columns")),
)
_PIECE_BYTES = 64
# The whole object in memory, the whole in pieces, and only the pieces that are needed.
MODES = ["memory", "pieces", "ranges"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", _PIECE_BYTES)


def _ranges(storage: WrappedStorage) -> list[tuple[str, int, int]]:
    """Return the names and bounds of the ranges that were read."""
    return [(each.name, *each.arguments.values()) for each in storage.operations if each.kind == "read_range"]


def _writer(num_rows: int = 20) -> Writer:
    writer = Writer(WrappedStorage(Storage("memory://")), num_rows, states=STATES)
    writer.dense = {"w": torch.randn(3), "mask": torch.tensor([True, False])}
    writer.training = [b"rank 0", bytes(range(200))]
    return writer


def _reader(
    storage: Storage, manifest: Manifest, mode: str, part: Part | None = None, **options: Any
) -> tuple[PartReader, list[BlockRows]]:
    """Open a part and its states."""
    part = part or manifest.parts[0]
    is_ranged = mode == "ranges"
    memory_bytes = MEMORY_BYTES if mode == "memory" else 0
    source = Ranged(storage, part) if is_ranged else None
    reader = PartReader(storage, part, manifest, memory_bytes=memory_bytes, source=source, **options)
    rows = reader.with_states(Ranged(storage, part.states) if is_ranged and part.states else None)
    return reader, rows


def _check(rows: list[BlockRows], writer: Writer, ids: list[int]) -> None:
    """Check that the rows and states of both column ranges are those of the writer."""
    assert [each.block.columns for each in rows] == [(0, 3), (3, 4)]
    for number, each in enumerate(rows):
        columns = slice(*each.block.columns)
        count = each.block.num_rows
        assert torch.equal(each.read(0, count), writer.table[ids, columns])
        sums, moments = each.states
        assert torch.equal(sums(0, count), writer.held_states[0][ids, number : number + 1])
        assert torch.equal(moments(0, count), writer.held_states[1][ids, columns])
        assert moments(1, 2).dtype == torch.bfloat16
        assert torch.equal(moments(1, 2), writer.held_states[1][ids[1:2], columns])


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_read_with_their_states(mode: str) -> None:
    writer = _writer()
    writer.change(list(range(20)))
    for publish, ids in ((writer.snapshot, list(range(20))), (lambda: writer.delta([2, 5, 9]), [2, 5, 9])):
        manifest = publish()
        read = StreamLog(writer.storage).read(manifest.version)
        assert read == manifest
        assert (read.format, read.states) == (STATES_FORMAT, {FQN: STATES})
        reader, rows = _reader(writer.storage, read, mode)
        _check(rows, writer, ids)
        assert all(not each.states for each in reader.rows)
        dense = reader.dense()
        assert dense.keys() == writer.dense.keys()
        assert all(torch.equal(dense[name], writer.dense[name]) for name in dense)


def test_the_objects_are_safetensors_files_that_end_with_digests() -> None:
    writer = _writer()
    manifest = writer.delta([2, 5, 9])
    part = manifest.parts[0]
    assert part.states is not None
    for stored in (part, part.states, *manifest.training):
        data = writer.storage.read(stored.name, max_bytes=1 << 20).tobytes()
        tensors = safetensors.torch.load(data)
        number = -(-stored.body // _PIECE_BYTES)
        assert len(data) == stored.num_bytes == stored.body + 16 * number
        digests = [xxhash.xxh3_128_digest(data[: stored.body][at : at + 64]) for at in range(0, stored.body, 64)]
        assert data[stored.body :] == b"".join(digests) == tensors["digests"].numpy().tobytes()
        assert stored.xxh3 == xxhash.xxh3_128_hexdigest(b"".join(digests))
    assert sorted(tensors) == ["digests", "state"]


def test_a_predictor_needs_no_states() -> None:
    writer = _writer()
    writer.snapshot()
    writer.delta([1, 2])
    model = writer.model()
    predictor = Predictor(ModelTarget(model, dense=False), writer.storage)
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    read = {each.name for each in writer.storage.operations if each.kind in ("read", "read_range")}
    assert not [name for name in read if "r0s" in name or "r0t" in name]


def test_a_predictor_of_an_older_release_keeps_its_version_and_asks_for_an_upgrade() -> None:
    writer = _writer()
    model = writer.model()
    predictor = Predictor(ModelTarget(model, dense=False), writer.storage)
    writer.snapshot()
    predictor.sync()
    manifest = writer.delta([1])
    held = model[FQN].clone()
    newer = manifest.to_json().replace(b'"format":2', b'"format":3')
    writer.storage.replace(entry_name(2), newer)
    for _ in range(2):
        with pytest.raises(NewerFormatError, match="Upgrade"):
            predictor.sync()
        assert predictor.version == 1
        assert torch.equal(model[FQN], held)
    writer.storage.replace(entry_name(2), manifest.to_json())
    assert predictor.sync() == 2
    assert torch.equal(model[FQN], writer.table)


def test_a_training_state_is_decoded_in_parts() -> None:
    writer = _writer()
    tree = {"training": {"opt": torch.randn(100)}, "rank": {"x": 3}, "data": None, "more": [1]}
    writer.training = [pack(tree, "state"), b"no state" * 30, b""]
    first, *others = writer.delta([1]).training
    writer.storage.take()
    reader = read_training(writer.storage, first)
    assert reader.keys() == ["training", "rank", "data", "more"]
    assert reader.load("rank") == {"x": 3}
    assert sum(end - begin for _, begin, end in _ranges(writer.storage)) < first.num_bytes - 300
    assert torch.equal(reader.load("training", "opt"), tree["training"]["opt"])
    for other in others:
        with pytest.raises(CorruptPartError, match="ValueError") as caught:
            read_training(writer.storage, other)
        assert caught.value.path == other.name


def test_only_the_pieces_that_are_needed_are_read() -> None:
    writer = _writer(1000)
    manifest = writer.snapshot()
    part = manifest.parts[0]
    writer.storage.take()
    _, rows = _reader(writer.storage, manifest, "ranges", blocks=[1])
    (only,) = rows
    assert only.block.columns == (3, 4)
    # Only the digests and the headers were read.
    assert all(begin < 600 or begin in (part.body, part.states.body) for _, begin, _ in _ranges(writer.storage))
    writer.storage.take()
    near = only.within((100, 110), (3, 4))
    assert torch.equal(near.read(0, 10), writer.table[100:110, 3:4])
    assert torch.equal(near.states[0](0, 10), writer.held_states[0][100:110, 1:2])
    found = _ranges(writer.storage)
    assert all(begin % _PIECE_BYTES == 0 and end - begin == _PIECE_BYTES for _, begin, end in found)
    assert len(found) <= 4  # at most two pieces of each object


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["part", "states"])
def test_every_flipped_byte_of_a_body_or_its_digests_is_refused(mode: str, which: str) -> None:
    writer = _writer()
    manifest = writer.delta([2, 5, 9])
    part = manifest.parts[0]
    stored = part if which == "part" else part.states
    assert stored is not None
    data = writer.storage.read(stored.name, max_bytes=1 << 20).tobytes()
    for at in range(0, len(data), 11):
        writer.storage.put(stored.name, [memoryview(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])])
        with pytest.raises(CorruptPartError) as caught:  # noqa: PT012  a range is refused when it is read
            _, rows = _reader(writer.storage, manifest, mode)
            for each in rows:
                for read in (each.read, *each.states):
                    read(0, 3)
            _reader(writer.storage, manifest, mode)[0].dense()
        assert caught.value.path == stored.name
    writer.storage.put(stored.name, [memoryview(data)])
    _check(_reader(writer.storage, manifest, mode)[1], writer, [2, 5, 9])


@pytest.mark.parametrize("mode", MODES)
def test_an_object_of_another_size_or_without_bytes_is_refused(mode: str) -> None:
    writer = _writer()
    manifest = writer.delta([2, 5, 9])
    for stored in (manifest.parts[0], manifest.parts[0].states):
        data = writer.storage.read(stored.name, max_bytes=1 << 20).tobytes()
        for damaged in (data[:-1], data + b"\0", b""):
            writer.storage.put(stored.name, [memoryview(damaged)])
            with pytest.raises(CorruptPartError):
                _reader(writer.storage, manifest, mode)
        writer.storage.delete(stored.name)
        with pytest.raises(CorruptPartError, match="does not exist"):
            _reader(writer.storage, manifest, mode)
        writer.storage.put(stored.name, [memoryview(data)])


def test_a_header_is_checked_before_it_is_used() -> None:
    """A range reader trusts the header only after the piece that has it was checked."""
    writer = _writer()
    manifest = writer.delta([2, 5, 9])
    part = manifest.parts[0]
    data = writer.storage.read(part.name, max_bytes=1 << 20).tobytes()
    writer.storage.put(part.name, [memoryview(data.replace(b'"1.ids"', b'"0.ids"'))])
    with pytest.raises(CorruptPartError, match="its piece 1 do not match"):
        PartReader(writer.storage, part, manifest, source=Ranged(writer.storage, part))


def _resealed(data: bytes, body: int) -> tuple[bytes, str]:
    """Return an object with the digests of its present bytes, and the hash of the digests."""
    digests = b"".join(xxhash.xxh3_128_digest(data[:body][at : at + 64]) for at in range(0, body, 64))
    return data[:body] + digests, xxhash.xxh3_128_hexdigest(digests)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "edit",
    [
        lambda head: head.replace(b'"0.states.0"', b'"9.states.0"'),
        lambda head: head.replace(b'"dtype":"BF16"', b'"dtype":"F16" ', 1),
        lambda head: head.replace(b'"shape":[3,1]', b'"shape":[1,3]', 1),
        lambda head: head.replace(b'"digests"', b'"digestz"'),
    ],
)
def test_states_that_are_not_what_the_table_declares_are_refused(mode: str, edit: Callable[[bytes], bytes]) -> None:
    writer = _writer()
    manifest = writer.delta([2, 5, 9])
    part = manifest.parts[0]
    assert part.states is not None
    data = writer.storage.read(part.states.name, max_bytes=1 << 20).tobytes()
    start = 8 + int.from_bytes(data[:8], "little")
    edited = data[:8] + edit(data[8:start]) + data[start:]
    assert edited != data
    edited, digest = _resealed(edited, part.states.body)
    writer.storage.put(part.states.name, [memoryview(edited)])
    part = replace(part, states=replace(part.states, xxh3=digest))
    with pytest.raises(CorruptPartError, match="instead of"):
        _reader(writer.storage, replace(manifest, parts=(part,)), mode, part)


@pytest.mark.parametrize("extra", range(0, 400, 7))
def test_the_header_and_the_number_of_digests_determine_each_other(extra: int) -> None:
    """The header holds the number of digests, and its length decides how many there are."""
    storage = Storage("memory://")
    data = pack({"x": "x" * extra}, "state")
    stored = put_training(storage, "parts/x.safetensors", [memoryview(data)], len(data))
    assert stored.num_bytes == digests_module.total_bytes(stored.body)
    assert read_training(storage, stored).load() == {"x": "x" * extra}


def test_digests_that_are_not_last_are_refused() -> None:
    """An empty tensor after the digests leaves their bytes where they were."""
    storage = Storage("memory://")
    header = {
        "digests": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]},
        "state": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]},
    }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    body = 8 + len(head)
    assert 64 < body <= 128 or body > 128
    number = -(-body // 64)
    head = head.replace(b"[32]", f"[{16 * number}]".encode()).replace(b"32", str(16 * number).encode())
    data, digest = _resealed(len(head).to_bytes(8, "little") + head + bytes(16 * number), body)
    storage.put("parts/x.safetensors", [memoryview(data)])
    with pytest.raises(CorruptPartError, match="its digests"):
        read_training(storage, Stored("parts/x.safetensors", len(data), body, digest))


def test_rows_keep_their_states_when_they_are_selected() -> None:
    block = Block(FQN, (10, 16), (0, 4), 6, "all", Encoding.F32)
    values = torch.arange(24.0).view(6, 4)
    states: list[Tensor] = [values[:, :1] + 0.5, values * 2]
    whole = BlockRows(
        block,
        None,
        lambda begin, end: values[begin:end],
        tuple(BlockRows.of(block, None, each).read for each in states),
    )
    listed = whole.take(torch.tensor([0, 2, 5]))
    for rows, places in (
        (whole, [0, 1, 2, 3, 4, 5]),
        (whole.loaded(), [0, 1, 2, 3, 4, 5]),
        (whole.within((11, 14), (0, 4)), [1, 2, 3]),
        (listed, [0, 2, 5]),
        (listed.within((12, 16), (0, 4)), [2, 5]),
        (listed.take(torch.tensor([1])).decoded(torch.float32), [2]),
    ):
        count = rows.block.num_rows
        assert count == len(places)
        assert torch.equal(rows.read(0, count), values[places])
        assert all(torch.equal(read(0, count), each[places]) for read, each in zip(rows.states, states, strict=True))
    assert whole.num_bytes == 6 * (16 + 4 + 16)
    assert listed.num_bytes == 3 * (16 + 4 + 16 + 8)
    with pytest.raises(AssertionError, match="states cannot be split"):
        whole.within((10, 16), (0, 2))


@pytest.mark.parametrize("fold", [1e9, 1e-9], ids=["delta", "snapshot"])
def test_a_compaction_keeps_the_states_with_their_rows(fold: float) -> None:
    writer = _writer()
    writer.change(list(range(20)))
    writer.snapshot()
    for ids in ([1, 2, 3], [2, 5], [3, 19], [2, 7]):
        last = writer.delta(ids)
    merged = compact(writer.storage, fold=fold)
    assert merged is not None
    assert (merged.kind, merged.schema, merged.training) == (
        "delta" if fold > 1 else "snapshot", last.schema, last.training
    )  # fmt: skip
    rows = [each for reader in read_parts(writer.storage, merged) for each in reader.with_states()]
    ids = [1, 2, 3, 5, 7, 19] if fold > 1 else list(range(20))
    assert sorted(rows[0].ids.tolist() if fold > 1 else range(20)) == ids
    _check(sorted(rows, key=lambda each: each.block.columns), writer, ids)


def test_a_fold_reads_the_parts_with_only_listed_rows_of_a_snapshot_once() -> None:
    """Such a part of each rank has the rows that changed while the others were copied."""
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage, states=STATES)
    whole = writer.snapshot()
    writer.change([1, 2])
    names = [f"parts/listed{role}.safetensors" for role in ("", "s")]
    listed = put_part(storage, names[0], writer.blocks([1, 2]), states_name=names[1])
    writer.claim.commit(replace(whole, parts=(*whole.parts, listed)))
    writer.delta([2, 3])
    writer.delta([4])
    storage.take()
    merged = compact(storage, fold=1e-9)
    assert merged is not None
    assert merged.kind == "snapshot"
    assert not any(storage.count("read", name=name) for name in names)
    assert {name for name, *_ in _ranges(storage)} == set(names)
    rows = [each for reader in read_parts(storage, merged) for each in reader.with_states()]
    _check(sorted(rows, key=lambda each: each.block.columns), writer, list(range(20)))


@pytest.mark.parametrize(
    "states",
    [
        None,
        replace(STATES, optimizer="EXACT_ADAGRAD"),
        replace(STATES, columns=((0, 2), (2, 4))),
        replace(STATES, states=STATES.states[::-1]),
    ],
    ids=["format", "optimizer", "columns", "states"],
)
def test_versions_with_other_states_are_not_merged(states: TableStates | None) -> None:
    writer = _writer()
    writer.dense = {}
    writer.snapshot()
    for _ in range(3):
        writer.delta([1, 2])
    other = Writer(writer.storage, states=states)
    for _ in range(3):
        other.delta([3, 4])  # no publisher writes it without a snapshot
    log = StreamLog(writer.storage)
    for fold in (1e9, 1e-9):
        compact(log, fold=fold)
        for entry in map(log.read_merged, log.merged()):
            versions = range(0 if entry.parent is None else entry.parent.version + 1, entry.version + 1)
            held = [version for version in map(log.read, versions) if version.kind != "claim"]
            assert all(version.schema == entry.schema for version in held)
    assert log.merged()


def test_tables_without_states_have_no_object_with_states() -> None:
    writer = Writer(Storage("memory://"), states=TableStates("EXACT_SGD", ((0, 2), (2, 4)), ()))
    manifest = writer.snapshot()
    part = manifest.parts[0]
    assert part.states is None
    (reader,) = read_parts(writer.storage, StreamLog(writer.storage).read(1))
    assert [each.states for each in reader.with_states()] == [(), ()]
    assert manifest.objects == (part,)


def test_a_part_with_some_tables_with_states() -> None:
    """Tables with and without states, and an empty block, are in one part."""
    storage = Storage("memory://")
    tables = {"a": TableSpec("a", 4, 2, torch.float32), "b": TableSpec("b", 4, 2, torch.float32)}
    states = {"b": TableStates("ADAM", ((0, 2),), (StateSpec("m", torch.float32, "columns"),))}
    values, moments = torch.randn(4, 2), torch.randn(4, 2)
    rows = []
    for fqn, count in (("a", 4), ("b", 0), ("b", 4)):
        block = Block(fqn, (0, count), (0, 2), count, "all", Encoding.F32)
        readers = (BlockRows.of(block, None, moments).read,) if fqn == "b" else ()
        rows.append(BlockRows(block, None, BlockRows.of(block, None, values).read, readers))
    part = put_part(storage, "parts/v.safetensors", rows, states_name="parts/s.safetensors")
    manifest = Manifest(
        stream="", generation=0, writer="", version=0, kind="delta", created=0.0, tables=tables, states=states,
        format=STATES_FORMAT, parts=(part,),
    )  # fmt: skip
    for mode in MODES:
        _, found = _reader(storage, manifest, mode)
        assert [len(each.states) for each in found] == [0, 1, 1]
        assert torch.equal(found[2].states[0](1, 3), moments[1:3])
        assert found[1].states[0](0, 0).shape == (0, 2)
        assert np.array_equal(found[0].read(0, 4).numpy(), values.numpy())


def test_a_reader_written_from_the_specification_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_PIECE_BYTES", _PIECE_BYTES)
    states_stream.make(tmp_path)
    log = StreamLog(Storage(f"file://{tmp_path}"))
    values: dict[str, np.ndarray] = {}
    states: dict[str, np.ndarray] = {}
    found: dict[str, Tensor] = {}
    for version in log.versions():
        manifest = log.read(version)
        if manifest.kind == "claim":
            continue
        entry = json.loads((tmp_path / entry_name(version)).read_bytes())
        records = [*entry["parts"], *(part["states"] for part in entry["parts"] if part["states"]), *entry["training"]]
        assert [record["name"] for record in records] == [each.name for each in manifest.objects]
        assert all(page.is_right((tmp_path / record["name"]).read_bytes(), record) for record in records)
        page.apply(tmp_path, entry, values)
        page.apply_states(tmp_path, entry, states)
        states_stream.apply(log.storage, manifest, found)
        expected = values | states
        assert found.keys() == expected.keys() - {"w", "mask"}
        for key, each in found.items():
            assert np.array_equal(each.numpy(), expected[key].astype(each.numpy().dtype))
        for stored in manifest.training:
            assert same_tree(page.training_of((tmp_path / stored.name).read_bytes()), states_stream.TREE)
            tree = read_training(log.storage, stored).load()
            assert pack(tree, "state") == pack(states_stream.TREE, "state")
