"""Real streams without a trainer, written with the library's log and codec."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import FORMAT, STATES_FORMAT, Block, DenseSpec, IdForm, Kind, Manifest
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.log import Claim, StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Identity, TableSpec, TableStates

FQN = "ec.embeddings.t"


def chunks_of(rows: BlockRows, num_rows: int) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the global ids and the stored rows of a block, in chunks of at most ``num_rows``."""
    ids = list(range(*rows.block.rows)) if rows.ids is None else rows.ids.tolist()
    for begin, stored in zip(range(0, len(ids), num_rows), rows.chunks(num_rows), strict=True):
        assert 1 <= len(stored) <= num_rows
        yield ids[begin : begin + len(stored)], stored


def a_second_later() -> AbstractContextManager[object]:
    """Return a context manager in which streams are newer than all positions that were saved before."""
    now = time.time
    return mock.patch.object(time, "time", side_effect=lambda: now() + 1)


class Writer:
    """A trainer's table and its publisher; predictors must end up equal to ``table``.

    Args:
        storage: store of the stream.
        num_rows: number of rows of the table.
        dim: number of columns of the table.
        dtype: dtype of the table.
        encoding: encoding of the rows; None for that of the dtype.
        states: states of the rows, for a stream of format 2; None for none.
        identity: rule for the raw ids of the rows, for a stream of format 2; None for a table without raw ids.

    Attributes:
        owners: raw ids of the rows, ``[num_rows]``, at first none. They do not change with the rows.
        owner_changes: numbers of admitted and evicted raw ids that versions record; None for none.
        held_states: the table's states, ``[num_rows, dim]`` or ``[num_rows, column ranges]`` each. They change together
            with the rows.
        training: training states of the ranks in bytes, which each version of format 2 has.
    """

    def __init__(
        self,
        storage: Storage,
        num_rows: int = 20,
        dim: int = 4,
        dtype: torch.dtype = torch.float32,
        encoding: Encoding | None = None,
        *,
        states: TableStates | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.storage = storage
        self.claim: Claim = StreamLog(storage).claim()
        self.spec = TableSpec(FQN, num_rows, dim, dtype)
        self.table = torch.zeros(num_rows, dim, dtype=dtype)
        self.dense: dict[str, Tensor] = {}
        self.encoding = encoding or Encoding.of(dtype)
        self.states = states
        self.identity = identity
        self.owners = torch.full((num_rows,), NO_OWNER)
        self.owner_changes: tuple[int, int] | None = None
        self.format = FORMAT if states is None and identity is None else STATES_FORMAT
        self.columns = ((0, dim),) if states is None else states.columns
        self.held_states = [
            torch.zeros(num_rows, dim if each.width == "columns" else len(self.columns), dtype=each.dtype)
            for each in (() if states is None else states.states)
        ]
        self.training: list[bytes] = []

    def snapshot(self) -> Manifest:
        return self.write("snapshot", self.blocks(None))

    def delta(self, ids: list[int]) -> Manifest:
        """Change the rows ``ids`` and their states to new random values and publish them."""
        self.change(ids)
        return self.write("delta", self.blocks(ids))

    def change(self, ids: list[int]) -> None:
        """Change the rows ``ids`` and their states to new random values."""
        for each in (self.table, *self.held_states):
            each[ids] = torch.randn(len(ids), each.shape[1]).to(each.dtype)

    def rows(self, ids: list[int] | None) -> BlockRows:
        """Return the current rows of the table, which has one column range; None for all rows."""
        (rows,) = self.blocks(ids)
        return rows

    def blocks(self, ids: list[int] | None) -> list[BlockRows]:
        """Return the current rows of the table, one block for each column range; None for all rows."""
        form: IdForm = "all" if ids is None else "gaps" if self.encoding.is_quantized else "list"
        places = list(range(self.spec.num_rows)) if ids is None else ids
        listed = None if ids is None else torch.tensor(ids, dtype=torch.int64)
        blocks = []
        for number, (first, end) in enumerate(self.columns):
            block = Block(FQN, (0, self.spec.num_rows), (first, end), len(places), form, self.encoding)
            whole = BlockRows.of(block, listed, encode_rows(self.table[places, first:end].clone(), self.encoding))
            states = []
            for spec, held in zip(() if self.states is None else self.states.states, self.held_states, strict=True):
                columns = (first, end) if spec.width == "columns" else (number, number + 1)
                states.append(BlockRows.of(block, listed, held[places, columns[0] : columns[1]].clone()).read)
            owners = BlockRows.of(block, listed, self.owners[places, None].clone()).read
            blocks.append(replace(whole, states=tuple(states), owners=None if self.identity is None else owners))
        return blocks

    def write(self, kind: Kind, rows: list[BlockRows], tables: Mapping[str, TableSpec] | None = None) -> Manifest:
        head = self.claim.head
        names = [part_name(head.version + 1, head.generation, author) for author in ("r0", "r0s")]
        part = put_part(
            self.storage, names[0], rows, self.dense, states_name=None if self.format == FORMAT else names[1]
        )
        draft = Manifest(
            stream="",
            generation=0,
            writer="",
            version=0,
            kind=kind,
            created=0.0,
            tables={FQN: self.spec} if tables is None else tables,
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.dense.items()},
            parts=(part,),
        )
        if self.format == STATES_FORMAT:
            training = tuple(
                put_training(
                    self.storage,
                    part_name(head.version + 1, head.generation, f"r{rank}t"),
                    [memoryview(data)],
                    len(data),
                )
                for rank, data in enumerate(self.training)
            )
            draft = replace(draft, format=STATES_FORMAT, training=training)
            if self.states is not None:
                draft = replace(draft, states={FQN: self.states})
            if self.identity is not None:
                changes = {} if self.owner_changes is None else {FQN: self.owner_changes}
                draft = replace(draft, identities={FQN: self.identity}, owner_changes=changes)
        return self.claim.commit(draft)

    def model(self) -> dict[str, Tensor]:
        """Return a predictor's empty model for this stream."""
        return {FQN: torch.full_like(self.table, -1)}
