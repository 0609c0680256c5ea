"""The format is frozen: today's code reads the bytes of format 1, and writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from delta_tracker import Predictor
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import dense_of, read_parts
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.stream.golden.make import ITEM, USER, make
from tests.stream.golden.reader import apply as apply_by_the_page
from tests.stream.streams import chunks_of

_GOLDEN = Path(__file__).parent / "golden" / "format-1"
_STREAM = _GOLDEN / "stream"


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
    assert Predictor(tables, _STREAM.as_uri(), dense=False).sync() == 7
    assert all(torch.equal(table, expected[fqn]) for fqn, table in tables.items())


def test_it_covers_every_form_of_the_format(log: StreamLog) -> None:
    blocks = {block for version in log.versions() for part in log.read(version).parts for block in part.blocks}
    assert {block.encoding for block in blocks} == {"F32", "F16", "BF16", "INT8", "INT4"}
    assert {block.ids for block in blocks} == {"all", "list", "gaps"}
    assert {spec.dtype for spec in log.read(1).dense.values()} == {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    }  # fmt: skip
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
