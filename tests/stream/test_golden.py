"""The formats are frozen: today's code reads the bytes of formats 1 and 2, and writes them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from delta_tracker import Encoding, ModelTarget, Predictor
from delta_tracker.raw_ids import NO_OWNER, check_owners
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.manifest import DENSE_DTYPES, IdForm, Manifest
from delta_tracker.stream.format.part_reader import dense_of, read_parts, read_training
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity
from tests.stream import states_stream
from tests.stream.golden.make import ITEM, USER, make
from tests.stream.golden.reader import apply as apply_by_the_page
from tests.stream.golden.reader import apply_states as apply_states_by_the_page
from tests.stream.golden.reader import faults_of, is_right, row_of, training_of
from tests.stream.states_stream import TREE, same_tree
from tests.stream.streams import chunks_of

_GOLDEN = Path(__file__).parent / "golden" / "format-1"
_STREAM = _GOLDEN / "stream"
_GOLDEN_2 = Path(__file__).parent / "golden" / "format-2"
_STREAM_2 = _GOLDEN_2 / "stream"


@pytest.fixture
def log() -> StreamLog:
    return StreamLog(Storage(_STREAM.as_uri()))


def _expected(version: int) -> dict[str, Tensor]:
    return safetensors.torch.load_file(_GOLDEN / "expected" / f"{version}.safetensors")


def _apply(log: StreamLog, manifest: Manifest, state: dict[str, Tensor], memory_bytes: int) -> None:
    """Apply a version in chunks of a few rows, in the order that the format requires."""
    for fqn, spec in manifest.tables.items():
        state.setdefault(fqn, torch.zeros(spec.num_rows, spec.dim, dtype=spec.dtype))
    readers = read_parts(log.storage, manifest, memory_bytes=memory_bytes)
    for is_whole in (True, False):
        for reader in readers:
            for rows in reader.rows:
                block, decoded = rows.block, rows.decoded(manifest.tables[rows.block.table].dtype)
                for ids, values in chunks_of(decoded, 7) if (block.ids == "all") == is_whole else ():
                    state[block.table][ids, block.columns[0] : block.columns[1]] = values
    state |= dense_of(readers)


def _assert_equal(state: dict[str, Tensor], version: int) -> None:
    expected = _expected(version)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_every_version_is_read_exactly(log: StreamLog, memory_bytes: int) -> None:
    assert [log.read(version).kind for version in log.versions()] == [
        "claim", "snapshot", "delta", "delta", "delta", "claim", "snapshot", "delta"
    ]  # fmt: skip
    state: dict[str, Tensor] = {}
    for version in log.versions():
        manifest = log.read(version)
        _apply(log, manifest, state, memory_bytes)
        assert version == 0 or manifest.parent == log.read(version - 1).link
        if manifest.kind != "claim":
            _assert_equal(state, version)


def test_merged_versions_are_read_exactly(log: StreamLog) -> None:
    state: dict[str, Tensor] = {}
    _apply(log, log.read(1), state, 1 << 20)
    merged = log.longest_merged(1)
    _apply(log, merged, state, 1 << 20)
    _assert_equal(state, 4)
    assert log.read(5).parent == merged.link
    state = {}
    newest = log.newest_snapshot()
    assert newest.merges == log.read(7).link
    _apply(log, newest, state, 1 << 20)
    _assert_equal(state, 7)


def test_a_predictor_holds_the_newest_version() -> None:
    expected = _expected(7)
    model = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    assert Predictor(model, _STREAM.as_uri()).sync() == 7
    for name, tensor in model.items():
        assert torch.equal(tensor, expected[name]), name
    tables = {fqn: torch.ones_like(expected[fqn]) for fqn in (USER, ITEM)}
    assert Predictor(ModelTarget(tables, dense=False), _STREAM.as_uri()).sync() == 7
    assert all(torch.equal(table, expected[fqn]) for fqn, table in tables.items())


def test_it_covers_every_form_of_the_format(log: StreamLog) -> None:
    blocks = {block for version in log.versions() for part in log.read(version).parts for block in part.blocks}
    assert {block.encoding for block in blocks} == set(Encoding)
    assert {block.ids for block in blocks} == set(get_args(IdForm))
    assert {spec.dtype_name for spec in log.read(1).dense.values()} == set(DENSE_DTYPES.values())
    escapes = [
        len(reader._file.tensor(f"{index}.escapes"))
        for version in log.versions()
        for reader in read_parts(log.storage, log.read(version))
        for index, block in enumerate(reader.part.blocks)
        if block.ids == "gaps"
    ]
    assert min(escapes) == 0
    assert max(escapes) > 0


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "stream", tmp_path / "expected")

    def objects(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    made, frozen = objects(tmp_path / "stream"), objects(_STREAM)
    assert made.keys() == frozen.keys()
    for name in frozen:
        assert made[name] == frozen[name], name
    assert sum(map(len, frozen.values())) < 60_000


def test_a_reader_written_from_the_specification_reads_the_same() -> None:
    state: dict[str, np.ndarray] = {}
    for path in sorted((_STREAM / "log").iterdir()):
        entry = json.loads(path.read_text())
        apply_by_the_page(_STREAM, entry, state)
        if entry["kind"] != "claim":
            expected = _expected(entry["version"])
            assert state.keys() == expected.keys()
            for name, tensor in expected.items():
                wanted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                assert state[name].tobytes() == wanted.numpy().tobytes(), name


def _names(manifest: Manifest) -> set[str]:
    states = {f"{fqn}/{state.name}" for fqn, each in manifest.states.items() for state in each.states}
    return {*manifest.tables, *states, *(f"{fqn}/owners" for fqn in manifest.identities)}


def _expected_2(version: int) -> dict[str, Tensor]:
    """Return the tensors of format 2 after a version: float32, and int64 for raw ids."""
    found = safetensors.torch.load_file(_GOLDEN_2 / "expected" / f"{version}.safetensors")
    return {name: each if name.endswith("/owners") else each.float() for name, each in found.items()}


@pytest.mark.parametrize("start", ["log", "merged delta", "merged snapshot"])
def test_every_version_of_format_2_is_read_exactly(start: str) -> None:
    log = StreamLog(Storage(_STREAM_2.as_uri()))
    merged = {each.kind: log.read_merged(each) for each in log.merged()}
    first = {
        "log": [log.read(version) for version in (1, 2, 3)],
        "merged delta": [log.read(1), merged["delta"]],
        "merged snapshot": [merged["snapshot"]],
    }[start]
    state: dict[str, Tensor] = {}
    for manifest in [*first, log.read(5), log.read(6)]:
        states_stream.apply(log.storage, manifest, state)
        expected = _expected_2(manifest.version)
        for name in _names(manifest):
            assert torch.equal(state[name], expected[name]), (manifest.version, name)
        assert len(manifest.training) == (2 if manifest.version < 4 else 0)
        for each in manifest.training:
            assert pack(read_training(log.storage, each).load(), "state") == pack(TREE, "state")
        (dense,) = [dense_of(read_parts(log.storage, manifest))]
        assert all(torch.equal(each.float(), expected[name]) for name, each in dense.items())


def test_a_predictor_maps_the_raw_ids_of_the_newest_version() -> None:
    expected = safetensors.torch.load_file(_GOLDEN_2 / "expected" / "6.safetensors")
    tables = {fqn: torch.ones_like(expected[fqn]) for fqn in states_stream.TABLES}
    indexes = {fqn: RawIdIndex(each.num_rows) for fqn, each in states_stream.IDENTITIES.items()}
    predictor = Predictor(ModelTarget(tables, dense=False, raw_ids=indexes), _STREAM_2.as_uri())
    assert predictor.sync() == 6
    entry = json.loads((_STREAM_2 / "log" / f"{6:020d}.json").read_text())
    identities = {fqn: table["identity"] for fqn, table in entry["tables"].items()}
    for fqn, table in tables.items():
        assert torch.equal(table, expected[fqn]), fqn
    for fqn, index in indexes.items():
        owners = expected[f"{fqn}/owners"]
        assert torch.equal(index.owners(), owners)
        (owned,) = (owners != NO_OWNER).nonzero(as_tuple=True)
        assert torch.equal(index.rows_of(owners[owned]), owned)
        unknown = [0, 1, -1, -2, 599, 600, 123_456_789, (1 << 63) - 1, -(1 << 63) + 1]
        raw_ids = [*owners[owned].tolist(), *unknown]
        rows = [row_of(identities[fqn], owners.numpy(), each) for each in raw_ids]
        assert index.rows_of(torch.tensor(raw_ids)).tolist() == [-1 if row is None else row for row in rows]


def test_it_covers_every_form_of_format_2() -> None:
    log = StreamLog(Storage(_STREAM_2.as_uri()))
    manifests = [log.read(version) for version in log.versions()]
    assert [each.kind for each in manifests] == ["claim", "snapshot", "delta", "delta", "claim", "snapshot", "delta"]
    assert [len(each.states) for each in manifests] == [0, 3, 3, 3, 0, 0, 0]
    assert [len(each.identities) for each in manifests] == [0, 2, 2, 2, 0, 2, 2]
    owned = {
        (block.table, block.ids, block.encoding)
        for each in manifests
        for part in each.parts
        for block in part.blocks
        if block.table in each.identities
    }
    assert {form for _, form, _ in owned} == {"all", "list", "gaps"}
    assert {encoding for _, _, encoding in owned} == {"INT8", "F16"}
    defaults = {bucket.default is None for identity in manifests[1].identities.values() for bucket in identity.buckets}
    assert defaults == {True, False}
    assert [each.kind for each in log.merged()] == ["snapshot", "delta"]


def test_the_same_content_gives_the_same_bytes_of_format_2(tmp_path: Path) -> None:
    states_stream.make(tmp_path / "stream", tmp_path / "expected")
    for folder in ("stream", "expected"):
        made, frozen = (
            {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
            for root in (tmp_path / folder, _GOLDEN_2 / folder)
        )
        assert made.keys() == frozen.keys()
        for name in frozen:
            assert made[name] == frozen[name], name
        assert sum(map(len, frozen.values())) < 60_000


def test_a_reader_written_from_the_specification_reads_the_same_of_format_2() -> None:
    state: dict[str, np.ndarray] = {}
    for path in sorted((_STREAM_2 / "log").iterdir()):
        entry = json.loads(path.read_text())
        if entry["kind"] == "claim":
            continue
        records = [*entry["parts"], *(part["states"] for part in entry["parts"] if part["states"]), *entry["training"]]
        assert all(is_right((_STREAM_2 / record["name"]).read_bytes(), record) for record in records)
        assert all(same_tree(training_of((_STREAM_2 / each["name"]).read_bytes()), TREE) for each in entry["training"])
        apply_by_the_page(_STREAM_2, entry, state)
        apply_states_by_the_page(_STREAM_2, entry, state)
        expected = _expected_2(entry["version"])
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert np.array_equal(state[name].astype(tensor.numpy().dtype), tensor.numpy()), name


@pytest.mark.parametrize(
    ("rows", "owners", "is_whole", "faults"),
    [
        ([0, 4], [3, 60], True, []),
        ([0, 4], [NO_OWNER, NO_OWNER], False, []),
        ([0, 1], [3, 3], True, []),
        ([0, 1], [3, 3], False, ["3 owns two rows"]),
        ([4], [3], False, ["3 owns row 4, which is not in its bucket"]),
        ([0], [60], True, ["60 owns row 0, which is not in its bucket"]),
        ([3], [3], False, ["3 owns the default row 3"]),
    ],
)
def test_both_readers_find_raw_ids_that_break_a_rule(
    rows: list[int], owners: list[int], is_whole: bool, faults: list[str]
) -> None:
    buckets = [{"rows": [0, 4], "default": 3}, {"rows": [4, 8], "default": 7}]
    assert faults_of({"hash_size": 100, "buckets": buckets}, rows, owners, is_whole=is_whole) == faults
    identity = Identity(100, (Bucket((0, 4), 3), Bucket((4, 8), 7)))
    with pytest.raises(ValueError, match="raw id") if faults else contextlib.nullcontext():
        check_owners(identity, torch.tensor(rows), torch.tensor(owners), is_unique=not is_whole)
