"""Parts: read exactly as written, in memory and in pieces; a part that differs from its record is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from delta_tracker.errors import CorruptPartError, StorageError
from delta_tracker.stream.format import digests as digests_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Manifest, Part
from delta_tracker.stream.format.object_reader import MEMORY_BYTES, Ranged
from delta_tracker.stream.format.part_reader import PartReader, read_parts
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stores.rules import calls, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer, chunks_of

NAME = "parts/p.safetensors"
_TABLE = TableSpec("t", 10, 4, torch.float32)
TABLES = {"t": _TABLE, "h": TableSpec("h", 6, 8, torch.bfloat16)}
# In memory, and read twice in pieces, of which one size is smaller than any tensor.
MODES = {"memory": MEMORY_BYTES, "pieces": 0}


@pytest.fixture(params=MODES, autouse=True)
def memory_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", 13)
    return MODES[request.param]


def rows_of(table: str, rows: tuple[int, int], values: Tensor, ids: list[int] | None, form: str = "list") -> BlockRows:
    """Return a block of all columns in the dtype of ``values``."""
    block = Block(table, rows, (0, values.shape[1]), len(values), "all" if ids is None else form, _own(values))
    listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
    return BlockRows.of(block, listed, values)


def _own(values: Tensor) -> Encoding:
    return Encoding.of(values.dtype)


def some_rows() -> list[BlockRows]:
    return [
        rows_of("h", (0, 6), torch.randn(6, 8).bfloat16(), None),
        rows_of("t", (5, 10), torch.randn(2, 4), [5, 9]),
        rows_of("t", (0, 5), torch.empty(0, 4), []),
        rows_of("h", (0, 6), torch.randn(3, 8).bfloat16(), [0, 2, 5], "gaps"),
    ]


def some_dense() -> dict[str, Tensor]:
    return {"w": torch.randn(3, 2), "steps": torch.tensor(7), "mask": torch.tensor([True, False]), "x": torch.ones(0)}


class Stored:
    """A part in a separate store."""

    def __init__(self, rows: list[BlockRows], dense: dict[str, Tensor] | None = None) -> None:
        self.storage = Storage("memory://")
        self.part = put_part(self.storage, NAME, rows, dense, states_name=None)
        self.data = self.storage.read(NAME, max_bytes=1 << 30).tobytes()
        self.tables = TABLES
        self.dense = {name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in (dense or {}).items()}

    def replace(self, data: bytes, *, is_recorded: bool) -> None:
        """Change the object, and with ``is_recorded`` the size and hash in its record."""
        if is_recorded:
            self.part = replace(self.part, num_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
        self.storage.put(NAME, [memoryview(data)])

    def read(self, memory_bytes: int, part: Part | None = None) -> PartReader:
        manifest = Manifest(
            stream="", generation=0, writer="", version=0, kind="delta", created=0.0,
            tables=self.tables, dense=self.dense, parts=(part or self.part,),
        )  # fmt: skip
        return PartReader(self.storage, part or self.part, manifest, memory_bytes=memory_bytes)


def listed(reader: PartReader, index: int, num_rows: int = 3) -> tuple[list[int], Tensor]:
    """Return the ids and stored rows of a block, read in chunks of ``num_rows``."""
    chunks = list(chunks_of(reader.rows[index], num_rows))
    ids = [row for found, _ in chunks for row in found]
    block = reader.part.blocks[index]
    empty = torch.empty(0, block.encoding.width(block.num_columns), dtype=block.encoding.dtype)
    return ids, torch.cat([empty, *(stored for _, stored in chunks)])


def test_a_part_is_read_as_it_was_written(memory_bytes: int) -> None:
    rows, dense = some_rows(), some_dense()
    stored = Stored(rows, dense)
    assert stored.part.num_bytes == len(stored.data)
    assert stored.part.blocks == tuple(wrote.block for wrote in rows)
    reader = stored.read(memory_bytes)
    for index, wrote in enumerate(rows):
        ids, values = listed(reader, index)
        assert ids == (list(range(*wrote.block.rows)) if wrote.ids is None else wrote.ids.tolist())
        assert torch.equal(values, wrote.read(0, wrote.block.num_rows))
        assert values.dtype == wrote.block.encoding.dtype
    read = reader.dense()
    assert list(read) == list(dense)
    for name, tensor in dense.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("form", ["all", "list", "gaps"])
def test_every_encoding_with_every_form_of_ids(memory_bytes: int, encoding: Encoding, form: str) -> None:
    values = torch.randn(10, 4)
    ids = None if form == "all" else torch.arange(10)
    block = Block("t", (0, 10), (0, 4), 10, form, encoding)
    wanted = encode_rows(values, encoding)
    reader = Stored([BlockRows.of(block, ids, wanted)]).read(memory_bytes)
    assert torch.equal(listed(reader, 0)[1], wanted)
    (decoded,) = reader.rows[0].decoded(torch.float32).chunks(10)
    assert decoded.dtype == torch.float32
    assert torch.allclose(decoded, values, atol=0.3)


def test_a_part_is_a_safetensors_file() -> None:
    rows, dense = some_rows(), some_dense()
    tensors = safetensors.torch.load(Stored(rows, dense).data)
    expected = ["0.values", "1.ids", "1.values", "2.ids", "2.values", "3.escapes", "3.gaps", "3.values"]
    assert sorted(tensors) == expected + [f"dense.{index}" for index in range(4)]
    assert torch.equal(tensors["1.ids"], rows[1].ids)
    assert torch.equal(tensors["0.values"], rows[0].read(0, 6))
    assert torch.equal(tensors["dense.1"], dense["steps"])


def test_a_column_slice_is_written_compactly(memory_bytes: int) -> None:
    wide = torch.randn(3, 8)
    rows = [BlockRows.of(Block("h", (0, 3), (4, 8), 3, "all", Encoding.F32), None, wide[:, 4:])]
    assert torch.equal(listed(Stored(rows).read(memory_bytes), 0)[1], wide[:, 4:])


@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "flipped", "empty"])
def test_damaged_bytes_are_refused(memory_bytes: int, change: str) -> None:
    stored = Stored(some_rows())
    data = bytearray(stored.data)
    if change == "missing":
        stored.storage.delete(NAME)
    else:
        data[len(data) // 2] ^= 1 if change == "flipped" else 0
        damaged = {"shorter": data[:-1], "longer": data + b"\0", "flipped": data, "empty": data[:0]}[change]
        stored.replace(bytes(damaged), is_recorded=False)
    with pytest.raises(CorruptPartError, match=r"parts/p\.safetensors") as caught:
        stored.read(memory_bytes)
    assert caught.value.path == NAME


@pytest.mark.parametrize("ids", [[9, 5], [5, 5], [4, 9], [5, 10], [-1, 5]])
def test_ids_out_of_order_or_range_are_refused(memory_bytes: int, ids: list[int]) -> None:
    stored = Stored([rows_of("t", (5, 10), torch.randn(2, 4), ids)])
    with pytest.raises(CorruptPartError, match="ids of table 't'"):
        stored.read(memory_bytes)


@pytest.mark.promise("refused")
def test_a_part_that_is_not_what_its_record_says_is_refused(memory_bytes: int) -> None:
    stored = Stored(some_rows(), some_dense())
    first, second, *others = stored.part.blocks
    for block in (
        replace(second, encoding=Encoding.F16),
        replace(second, ids="gaps"),
        replace(second, num_rows=3),
        replace(second, columns=(0, 3)),
    ):
        with pytest.raises(CorruptPartError, match="instead of"):
            stored.read(memory_bytes, replace(stored.part, blocks=(first, block, *others)))
    with pytest.raises(CorruptPartError, match="it has the tensors"):
        stored.read(memory_bytes, replace(stored.part, blocks=stored.part.blocks[:1]))
    with pytest.raises(CorruptPartError, match="it has the tensors"):
        stored.read(memory_bytes, replace(stored.part, dense=("w", "steps", "mask")))
    stored.dense["w"] = DenseSpec(torch.float32, (2, 3))
    with pytest.raises(CorruptPartError, match="instead of"):
        stored.read(memory_bytes)


def test_bytes_that_no_tensor_claims_are_refused(memory_bytes: int) -> None:
    stored = Stored(some_rows())
    stored.replace(stored.data + bytes(8), is_recorded=True)
    with pytest.raises(CorruptPartError, match="8 bytes after its last tensor"):
        stored.read(memory_bytes)


def _with_header(data: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a part with another header and the same tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = edit(data[8:end].rstrip())
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + data[end:]


def test_an_invalid_bool_is_refused(memory_bytes: int) -> None:
    stored = Stored([], {"mask": torch.tensor([True, False, True])})
    stored.replace(stored.data[:-1] + b"\2", is_recorded=True)
    with pytest.raises(CorruptPartError, match="other than 0 and 1"):
        stored.read(memory_bytes)


def test_a_duplicate_tensor_in_the_header_is_refused(memory_bytes: int) -> None:
    stored = Stored([], {"mask": torch.tensor([True])})
    stored.replace(_with_header(stored.data, lambda head: head[:-1] + b"," + head[1:]), is_recorded=True)
    with pytest.raises(CorruptPartError, match="twice"):
        stored.read(memory_bytes)


@pytest.mark.parametrize("number", [b"1.0", b"true", b'"1"'])
def test_a_size_that_is_no_integer_is_refused(memory_bytes: int, number: bytes) -> None:
    stored = Stored([], {"mask": torch.tensor([True])})
    stored.replace(_with_header(stored.data, lambda head: head.replace(b"[1]", b"[" + number + b"]")), is_recorded=True)
    with pytest.raises(CorruptPartError, match="instead of"):
        stored.read(memory_bytes)


@pytest.mark.promise("unpickled")
def test_sizes_that_wrap_around_are_refused(memory_bytes: int) -> None:
    """The size of 2^62 rows of 8 columns wraps around to 0 in 64 bits."""
    stored = Stored([rows_of("t", (0, 0), torch.empty(0, 8), None)])
    block = replace(stored.part.blocks[0], rows=(0, 2**62), num_rows=2**62)
    wrapped = _with_header(stored.data, lambda head: head.replace(b"[0,8]", b"[%d,8]" % 2**62))
    stored.replace(wrapped, is_recorded=True)
    with pytest.raises(CorruptPartError, match="instead of"):
        stored.read(memory_bytes, replace(stored.part, blocks=(block,)))


@pytest.mark.promise("unpickled")
def test_mutated_parts_are_refused_or_right(memory_bytes: int) -> None:
    """Size and hash match, so that the layout's checks are reached."""
    draw = random.Random(0)
    stored = Stored(some_rows(), some_dense())
    data, refused = stored.data, 0
    for _ in range(700):
        mutant = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        if draw.random() < 0.3:
            mutant = mutant[: draw.randrange(len(mutant))]
        stored.replace(bytes(mutant), is_recorded=True)
        try:
            reader = stored.read(memory_bytes)
        except CorruptPartError:
            refused += 1
            continue
        for index, block in enumerate(stored.part.blocks):
            ids, values = listed(reader, index)
            assert values.shape == (block.num_rows, block.encoding.width(block.num_columns))
            assert values.dtype == block.encoding.dtype
            assert sorted(set(ids)) == ids
            assert set(ids) <= set(range(*block.rows))
    assert refused > 300


def test_a_large_part_that_changes_while_it_is_applied_is_refused() -> None:
    stored = Stored([rows_of("t", (0, 10), torch.randn(10, 4), None)])
    reader = stored.read(0)
    stored.replace(stored.data[:-1] + b"\xff", is_recorded=False)
    with pytest.raises(CorruptPartError, match="it changed while"):
        list(reader.rows[0].chunks(3))
    stored.storage.delete(NAME)
    with pytest.raises(CorruptPartError, match="it was deleted"):
        list(reader.rows[0].chunks(4))


def test_a_large_part_that_shrinks_between_its_size_and_its_bytes_is_refused() -> None:
    stored = Stored(some_rows())
    inner = stored.storage
    shrinks = calls(on("size"), after=lambda operation, _: inner.put(operation.name, [memoryview(b"short")]))
    stored.storage = WrappedStorage(inner, shrinks)
    with pytest.raises((CorruptPartError, StorageError)):
        stored.read(0)


def test_parts_together_stay_within_the_memory() -> None:
    writer = Writer(Storage("memory://"))
    writer.dense = {"w": torch.randn(2)}
    manifest = writer.delta([3, 4])
    (part,) = manifest.parts
    manifest = replace(manifest, parts=(part, part))
    for memory_bytes in (0, part.num_bytes, 2 * part.num_bytes):
        readers = read_parts(writer.storage, manifest, memory_bytes=memory_bytes)
        held = [not isinstance(getattr(reader._file._read, "__self__", None), Ranged) for reader in readers]
        assert sum(held) == memory_bytes // part.num_bytes
        assert torch.equal(readers[0].dense()["w"], writer.dense["w"])


def test_the_table_of_the_writer_is_what_a_reader_gets(memory_bytes: int) -> None:
    writer = Writer(Storage("memory://"))
    manifest = writer.delta([3, 4])
    (reader,) = read_parts(writer.storage, manifest, memory_bytes=memory_bytes)
    assert reader.part.blocks[0].table == FQN
    ids, values = listed(reader, 0)
    assert ids == [3, 4]
    assert torch.equal(values, writer.table[[3, 4]])
