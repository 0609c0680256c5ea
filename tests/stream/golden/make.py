"""Writes the frozen stream: ``python -m tests.stream.golden.make DIRECTORY``. Run it once per format, by hand.

Contents are counted, not drawn, and the clock and the random names are replaced: the same code writes the same bytes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
from torch import Tensor

from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, IdForm, Kind, Manifest, Part
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.log import Claim, StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

USER, ITEM = "ec.embeddings.user", "ebc.embedding_bags.item"
_TABLES = {USER: TableSpec(USER, 12, 4, torch.float32), ITEM: TableSpec(ITEM, 600, 2, torch.float16)}
_WIDE = [0, 1, 255, 256, 511, 599]  # gaps of 0, 253, 254 and 87: none escapes
_WIDER = [3, 259, 599]  # gaps of 3, 255 and 339: two escape


class _Counted:
    """Replacement of the module ``secrets`` with counted names."""

    def __init__(self, names: Iterator[int]) -> None:
        self._names = names

    def token_hex(self, num_bytes: int) -> str:
        return f"{next(self._names):0{2 * num_bytes}x}"


@contextmanager
def without_chance() -> Iterator[None]:
    """Replace the clock by one that ticks by 0.25 s, and random names by counted ones."""
    names = itertools.count(1)
    with (
        # the log's only: stores name their drafts randomly too
        mock.patch("delta_tracker.stream.log.secrets", _Counted(names)),
        mock.patch("time.time", _ticking()),
    ):
        yield


def _ticking() -> Callable[[], float]:
    """Return a clock that ticks by 0.25 s when this thread reads it. Other threads, which may run, read the time."""
    ticks, thread, now = itertools.count(4), threading.get_ident(), time.time
    return lambda: next(ticks) / 4 if threading.get_ident() == thread else now()


class Maker:
    """A trainer's tables and the rows that it writes."""

    def __init__(self, url: str, expected: Path) -> None:
        self._storage = Storage(url, create=True)
        self._log = StreamLog(self._storage)
        self._expected = expected
        self._claim: Claim = self._log.claim()
        self._count = 0
        self.tables = {fqn: torch.zeros(spec.num_rows, spec.dim, dtype=spec.dtype) for fqn, spec in _TABLES.items()}
        self.dense: dict[str, Tensor] = {}

    def claim(self) -> None:
        self._claim = self._log.claim()

    def rows(
        self, fqn: str, encoding: Encoding, rows: tuple[int, int], columns: tuple[int, int], ids: Sequence[int] | None,
        form: IdForm = "all", *, written: Tensor | None = None,
    ) -> BlockRows:  # fmt: skip
        """Change a block of a table and return its rows; the table then holds the values that a reader gets.

        Args:
            written: the values to write, where the table does not keep them.
        """
        listed = list(range(*rows)) if ids is None else list(ids)
        count = len(listed) * (columns[1] - columns[0])
        self._count += 1
        # Integers up to 64 in eighths: each dtype holds them exactly, and no row is constant.
        values = ((torch.arange(count) * 7 + self._count * 5) % 129 - 64).view(len(listed), columns[1] - columns[0]) / 8
        values = values if written is None else written
        stored = encode_rows(values, encoding)
        if written is None:
            self.tables[fqn][listed, columns[0] : columns[1]] = values.to(_TABLES[fqn].dtype)
        block = Block(fqn, rows, columns, len(listed), form, encoding)
        return BlockRows.of(block, None if ids is None else torch.tensor(ids, dtype=torch.int64), stored)

    def decoded(self, rows: BlockRows) -> BlockRows:
        """Return the same rows after setting the table to the decoded values of a lossy encoding."""
        block = rows.block
        (stored,) = rows.chunks()
        values = decode_rows(stored, block.encoding, block.num_columns, _TABLES[block.table].dtype)
        self.tables[block.table][rows.ids, block.columns[0] : block.columns[1]] = values
        return rows

    def part(self, author: str, rows: Sequence[BlockRows], dense: Mapping[str, Tensor] | None = None) -> Part:
        head = self._claim.head
        self.dense |= dense or {}
        name = part_name(head.version + 1, head.generation, author)
        return put_part(self._storage, name, rows, dense, states_name=None)

    def commit(self, kind: Kind, batches: tuple[int, int], parts: Sequence[Part], pending_rows: int = 0) -> Manifest:
        entry = self._claim.commit(self._draft(kind, batches, parts, pending_rows))
        tensors = {**self.tables, **self.dense}
        safetensors.torch.save_file(tensors, self._expected / f"{entry.version}.safetensors")
        return entry

    def merge(self, kind: Kind, parent: Manifest | None, last: Manifest, parts: Sequence[Part]) -> None:
        snapshot = last.version if kind == "snapshot" else last.snapshot
        draft = self._draft(kind, (0 if parent is None else parent.batches[1], last.batches[1]), parts, 0)
        entry = replace(
            draft, stream=last.stream, generation=last.generation, writer=last.writer, version=last.version,
            parent=parent and parent.link, snapshot=snapshot, merges=last.link, created=last.created,
        )  # fmt: skip
        assert self._log.create_merged(entry)

    def whole(self, author: str) -> Part:
        """Return a part with all tables and dense tensors."""
        blocks = [
            self.rows(fqn, Encoding.of(spec.dtype), (0, spec.num_rows), (0, spec.dim), None, written=self.tables[fqn])
            for fqn, spec in _TABLES.items()
        ]
        return self.part(author, blocks, self.dense)

    def _draft(self, kind: Kind, batches: tuple[int, int], parts: Sequence[Part], pending_rows: int) -> Manifest:
        held = [name for part in parts for name in part.dense]
        return Manifest(
            stream="", generation=0, writer="", version=0, kind=kind, batches=batches, cut=batches[1] / 2,
            created=0.0, pending_rows=pending_rows, tables=_TABLES, parts=tuple(parts),
            dense={name: DenseSpec(self.dense[name].dtype, tuple(self.dense[name].shape)) for name in held},
        )  # fmt: skip


def _dense(step: int) -> dict[str, Tensor]:
    return {
        "over.weight": torch.arange(6, dtype=torch.float32).view(2, 3) + step,
        "over.bias": torch.tensor([0.5, -step]).bfloat16(),
        "half": torch.tensor([step / 2]).half(),
        "num_batches": torch.tensor(step, dtype=torch.int64),
        "double": torch.tensor([[step / 3]], dtype=torch.float64),
        "flags": torch.tensor([True, False, bool(step % 2)]),
        "small": torch.tensor([step, 255 - step], dtype=torch.uint8),
        "signed": torch.tensor([-step], dtype=torch.int8),
        "short": torch.tensor([-300, step], dtype=torch.int16),
        "int": torch.tensor([step], dtype=torch.int32),
        "empty": torch.empty(0, 3),
    }


def make(directory: Path, expected: Path) -> None:
    """Write the stream to ``directory``, and its tables after each version to ``expected``."""
    expected.mkdir(parents=True, exist_ok=True)
    with without_chance():
        maker = Maker(directory.absolute().as_uri(), expected)
        # 1: a snapshot of two ranks, one table cut by rows, the other by columns
        first = maker.commit("snapshot", (0, 2), [
            maker.part("r0", [
                maker.rows(USER, Encoding.F32, (0, 5), (0, 4), None),
                maker.rows(ITEM, Encoding.F16, (0, 600), (0, 1), None),
            ], _dense(1)),
            maker.part("r1", [
                maker.rows(USER, Encoding.F32, (5, 12), (0, 4), None),
                maker.rows(ITEM, Encoding.F16, (0, 600), (1, 2), None),
            ]),
        ])  # fmt: skip
        # 2: lists, a block without rows, and one of all rows in its range
        maker.commit("delta", (2, 3), [
            maker.part("r0", [
                maker.rows(USER, Encoding.F32, (0, 5), (0, 4), [0, 4], "list"),
                maker.rows(ITEM, Encoding.F16, (0, 600), (0, 1), [], "list"),
                maker.rows(ITEM, Encoding.BF16, (0, 600), (1, 2), _WIDE, "list"),
            ]),
            maker.part("r1", [maker.rows(USER, Encoding.F32, (5, 8), (0, 4), None)]),
        ], 3)  # fmt: skip
        # 3: gaps, with and without escapes, in int8 and float16
        maker.commit("delta", (3, 4), [
            maker.part("r0", [
                maker.decoded(maker.rows(USER, Encoding.INT8, (0, 5), (0, 4), [1, 2], "gaps")),
                maker.decoded(maker.rows(ITEM, Encoding.INT8, (0, 600), (0, 2), _WIDER, "gaps")),
            ]),
            maker.part("r1", [maker.rows(USER, Encoding.F16, (5, 12), (0, 4), [5, 11], "gaps")]),
        ])  # fmt: skip
        # 4: int4, and dense tensors that changed
        last = maker.commit("delta", (4, 7), [
            maker.part("r0", [
                maker.decoded(maker.rows(USER, Encoding.INT4, (0, 12), (0, 4), [0, 3, 4, 7], "list")),
                maker.decoded(maker.rows(ITEM, Encoding.INT4, (0, 600), (0, 2), _WIDER, "gaps")),
            ], _dense(2)),
        ])  # fmt: skip
        maker.merge("delta", first, last, [maker.part("merge", [
            maker.rows(USER, Encoding.F32, (0, 12), (0, 4), None, written=maker.tables[USER]),
            maker.rows(ITEM, Encoding.F16, (0, 600), (0, 2), sorted({*_WIDE, *_WIDER}), "list",
                       written=maker.tables[ITEM][sorted({*_WIDE, *_WIDER})]),
        ], maker.dense)])  # fmt: skip
        # 5 and 6: another publisher, whose snapshot was copied while rows changed
        maker.claim()
        copied = maker.part("r0", [
            maker.rows(USER, Encoding.F32, (0, 12), (0, 4), None),
            maker.rows(ITEM, Encoding.F16, (0, 600), (0, 2), None),
        ])  # fmt: skip
        changed = maker.part("r0", [
            maker.rows(USER, Encoding.F32, (0, 12), (0, 4), [2, 9], "list"),
            maker.rows(ITEM, Encoding.F16, (0, 600), (0, 2), _WIDER, "gaps"),
        ], _dense(3))  # fmt: skip
        maker.commit("snapshot", (7, 9), [changed, copied])
        # 7: nothing changed; and all of it in one
        newest = maker.commit("delta", (9, 9), [])
        maker.merge("snapshot", None, newest, [maker.whole("merge")])


if __name__ == "__main__":
    root = Path(sys.argv[1])
    make(root / "stream", root / "expected")
