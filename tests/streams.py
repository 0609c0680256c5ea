"""Real streams without a trainer: versions written by the library's own log and codec."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.stream.codec import Rows, encode
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.manifest import Block, Kind, Manifest
from delta_tracker.stream.storage import Storage
from delta_tracker.types import TableSpec

FQN = "ec.embeddings.t"


class Writer:
    """A trainer's table and its publisher in one; ``table`` is what predictors must end up with."""

    def __init__(self, storage: Storage, num_rows: int = 20, dim: int = 4, dtype: torch.dtype = torch.float32) -> None:
        self.storage = storage
        self.claim: Claim = StreamLog(storage).claim()
        self.spec = TableSpec(FQN, num_rows, dim, dtype)
        self.table = torch.zeros(num_rows, dim, dtype=dtype)

    def snapshot(self) -> Manifest:
        block = Block(FQN, (0, self.spec.num_rows), (0, self.spec.dim), self.spec.num_rows, whole=True)
        return self.write("snapshot", [Rows(block, None, self.table)])

    def delta(self, ids: list[int]) -> Manifest:
        """Change the rows ``ids`` to new random values and publish them."""
        self.table[ids] = torch.randn(len(ids), self.spec.dim).to(self.table.dtype)
        block = Block(FQN, (0, self.spec.num_rows), (0, self.spec.dim), len(ids), whole=False)
        return self.write("delta", [Rows(block, torch.tensor(ids, dtype=torch.int64), self.table[ids])])

    def write(self, kind: Kind, rows: list[Rows], tables: Mapping[str, TableSpec] | None = None) -> Manifest:
        part, buffers = encode(rows, f"parts/{secrets.token_hex(8)}.safetensors")
        self.storage.put(part.name, buffers)
        draft = Manifest(
            stream="",
            generation=0,
            writer="",
            version=0,
            kind=kind,
            created=0.0,
            tables={FQN: self.spec} if tables is None else tables,
            parts=(part,),
        )
        return self.claim.commit(draft)

    def model(self) -> dict[str, Tensor]:
        """An empty predictor's model for this stream."""
        return {FQN: torch.full_like(self.table, -1)}
