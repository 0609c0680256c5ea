"""Real streams without a trainer, written with the library's log and codec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding, encode_rows
from delta_tracker.stream.format.manifest import Block, DenseSpec, IdForm, Kind, Manifest
from delta_tracker.stream.format.part_writer import PartWriter
from delta_tracker.stream.log import Claim, StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

FQN = "ec.embeddings.t"


def chunks_of(rows: BlockRows, num_rows: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the global ids and the stored rows of a block, in chunks of at most ``num_rows``."""
    ids = list(range(*rows.block.rows)) if rows.ids is None else rows.ids.tolist()
    for begin, stored in zip(range(0, len(ids), num_rows), rows.chunks(num_rows), strict=True):
        assert 1 <= len(stored) <= num_rows
        yield ids[begin : begin + len(stored)], stored


class Writer:
    """A trainer's table and its publisher; predictors must end up equal to ``table``."""

    def __init__(
        self,
        storage: Storage,
        num_rows: int = 20,
        dim: int = 4,
        dtype: torch.dtype = torch.float32,
        encoding: Encoding | None = None,
    ) -> None:
        self.storage = storage
        self.claim: Claim = StreamLog(storage).claim()
        self.spec = TableSpec(FQN, num_rows, dim, dtype)
        self.table = torch.zeros(num_rows, dim, dtype=dtype)
        self.dense: dict[str, Tensor] = {}
        self.encoding = encoding or Encoding.of(dtype)

    def snapshot(self) -> Manifest:
        return self.write("snapshot", [self.rows(None)])

    def delta(self, ids: list[int]) -> Manifest:
        """Change the rows ``ids`` to new random values and publish them."""
        self.table[ids] = torch.randn(len(ids), self.spec.dim).to(self.table.dtype)
        return self.write("delta", [self.rows(ids)])

    def rows(self, ids: list[int] | None) -> BlockRows:
        """Return the current rows of the table; None for all of them."""
        held = self.table.clone() if ids is None else self.table[ids]
        form: IdForm = "all" if ids is None else "gaps" if self.encoding.is_quantized else "list"
        block = Block(FQN, (0, self.spec.num_rows), (0, self.spec.dim), len(held), form, self.encoding)
        listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        return BlockRows.of(block, listed, encode_rows(held, self.encoding))

    def write(self, kind: Kind, rows: list[BlockRows], tables: Mapping[str, TableSpec] | None = None) -> Manifest:
        head = self.claim.head
        name = part_name(head.version + 1, head.generation, "r0")
        part = PartWriter(name, rows, self.dense)
        self.storage.put(name, part.buffers())
        draft = Manifest(
            stream="",
            generation=0,
            writer="",
            version=0,
            kind=kind,
            created=0.0,
            tables={FQN: self.spec} if tables is None else tables,
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.dense.items()},
            parts=(part.part,),
        )
        return self.claim.commit(draft)

    def model(self) -> dict[str, Tensor]:
        """Return a predictor's empty model for this stream."""
        return {FQN: torch.full_like(self.table, -1)}
