"""Writer of small streams, for cases that the frozen streams do not have. Contents are drawn with a seed."""

from __future__ import annotations

import copy
import functools
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance.stream import (
    NO_OWNER,
    Entry,
    Stream,
    Tensor,
    Tensors,
    entry_name,
    file_of,
    file_with_digests,
    merged_name,
    seal,
    to_bytes,
    xxh3,
)
from tests.stream.golden import reader as page

STREAM = "5" * 32


@dataclass(frozen=True)
class Block:
    """A block of a part: its record, and its tensors by the part of their names after the index."""

    record: dict[str, Any]
    tensors: Tensors


@dataclass
class Part:
    """The content of a part."""

    blocks: Sequence[Block] = ()
    dense: Tensors = field(default_factory=dict)


def table(num_rows: int, dim: int, dtype: str = "F32") -> dict[str, Any]:
    """Return the record of a table of format 1."""
    return {"num_rows": num_rows, "dim": dim, "dtype": dtype}


def table_2(
    num_rows: int, dim: int, dtype: str = "F32", *, identity: dict[str, Any] | None = None, has_states: bool = False
) -> dict[str, Any]:
    """Return the record of a table of format 2."""
    states = [{"name": "sum", "dtype": "F32", "width": "range"}] if has_states else []
    optimizer = "EXACT_ROWWISE_ADAGRAD" if has_states else None
    found = table(num_rows, dim, dtype)
    return found | {"columns": [[0, dim]], "optimizer": optimizer, "states": states, "identity": identity}


def identity(hash_size: int, *buckets: tuple[int, int, int | None]) -> dict[str, Any]:
    """Return the rule for raw ids with these buckets: first row, end and default row."""
    found = [{"rows": [first, end], "default": default} for first, end, default in buckets]
    return {"dtype": "I64", "hash_size": hash_size, "buckets": found}


class Maker:
    """A publisher of a stream whose tables stay the same.

    Args:
        tables: records of the tables by name; those of format 2 make a stream of format 2.
        first: version of the first entry.

    Attributes:
        owners: table to the raw ids of its rows now, for the next blocks.
        known: table to the raw ids that ever owned a row.
    """

    def __init__(self, tables: Mapping[str, dict[str, Any]], first: int = 0) -> None:
        self.stream = Stream()
        self.tables = dict(tables)
        self.format = 2 if any("identity" in each for each in tables.values()) else 1
        self.owners = {
            fqn: np.full(each["num_rows"], NO_OWNER, "<i8") for fqn, each in tables.items() if each.get("identity")
        }
        self.known: defaultdict[str, list[int]] = defaultdict(list)
        self._draw = np.random.default_rng(0)
        self._id = STREAM
        self._version = first - 1
        self._generation = 0
        self._snapshot: int | None = None
        self._batches = 0
        self._num_parts = 0

    # Contents

    def block(
        self,
        fqn: str,
        ids: Sequence[int] | None = None,
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        form: str = "list",
        encoding: str | None = None,
        values: np.ndarray[Any, Any] | None = None,
    ) -> Block:
        """Return rows of a table with new random values, and the owners that they have now; None for all rows."""
        spec = self.tables[fqn]
        within = rows or (0, spec["num_rows"])
        first, end = columns or (0, spec["dim"])
        listed = list(range(*within)) if ids is None else list(ids)
        encoding = encoding or spec["dtype"]
        record = {
            "table": fqn,
            "rows": list(within),
            "columns": [first, end],
            "num_rows": len(listed),
            "ids": "all" if ids is None else form,
            "encoding": encoding,
        }
        stored = self.values(encoding, len(listed), end - first) if values is None else values
        tensors = {"values": Tensor.of(stored, "U8" if encoding in ("INT8", "INT4") else encoding)}
        if ids is not None:
            tensors |= packed(listed) if form == "gaps" else {"ids": Tensor.of(np.array(listed, "<i8"), "I64")}
        if fqn in self.owners:
            tensors["owners"] = Tensor.of(self.owners[fqn][listed], "I64")
        return Block(record, tensors)

    def values(self, encoding: str, num_rows: int, dim: int) -> np.ndarray[Any, Any]:
        """Return random rows as an encoding stores them."""
        if encoding not in ("INT8", "INT4"):
            return self._draw.normal(0, 3, (num_rows, dim)).astype("<f2" if encoding == "F16" else "<f4")
        width, dtype = (dim, "<f4") if encoding == "INT8" else (dim // 2, "<f2")
        codes = self._draw.integers(0, 256, (num_rows, width), np.uint8)
        scale_bias = self._draw.normal(0, 0.1, (num_rows, 2)).astype(dtype)
        return np.concatenate([codes, scale_bias.view(np.uint8)], axis=1)

    def own(self, fqn: str, row: int, owner: int) -> None:
        """Give a row to a raw id, ``NO_OWNER`` for none."""
        self.owners[fqn][row] = owner
        self.known[fqn].append(owner)

    # Entries

    def claim(self, **changes: Any) -> int:
        """Append a claim."""
        self._generation += 1
        return self._append({"kind": "claim", "format": 1} | changes)

    def snapshot(self, parts: Sequence[Part] | None = None, **changes: Any) -> int:
        """Append a snapshot of all tables; by default with all rows and one dense tensor."""
        dense = {"w": Tensor.of(self._draw.normal(size=(2, 3)), "F32")}
        self._snapshot = self._version + 1
        return self.commit("snapshot", parts or [Part([self.block(fqn) for fqn in self.tables], dense)], **changes)

    def delta(self, *blocks: Block, **changes: Any) -> int:
        """Append a delta with one part."""
        return self.commit("delta", [Part(blocks)], **changes)

    def commit(self, kind: str, parts: Sequence[Part], **changes: Any) -> int:
        """Append a version; ``changes`` replaces fields of its entry."""
        self._batches += 1
        return self._append(self._version_of(kind, self._version + 1, parts) | changes)

    def merge(self, kind: str, after: int | None, last: int, **changes: Any) -> str:
        """Add a merged entry for the versions above ``after``, and return its name."""
        state, ids = self.stream.state(last), self._changed(after, last)
        blocks = []
        for fqn in self.tables:
            if fqn in self.owners:
                self.owners[fqn] = state[f"{fqn}/owners"].copy()
            blocks += [
                self.block(fqn, each, values=state[fqn] if each is None else state[fqn][each])
                for each in ([None] if kind == "snapshot" else [ids[fqn]] if ids[fqn] else [])
            ]
        dense = {name: each for name, each in self.stream.expected(last).items() if self._is_dense(name)}
        final = self.stream.entry(last)
        entry = self._entry() | self._version_of(kind, last, [Part(blocks, dense)])
        entry |= {each: final[each] for each in ("stream", "generation", "writer", "version", "snapshot", "batches")}
        entry["snapshot"] = last if kind == "snapshot" else final["snapshot"]
        entry |= {"parent": None if after is None else self.stream.link(after), "merges": self.stream.link(last)}
        name = merged_name(last, 0 if after is None else after + 1, kind)
        self.stream.objects[name] = to_bytes(entry | changes)
        return name

    def _is_dense(self, name: str) -> bool:
        return name not in self.tables and not name.endswith(".owners")

    def _changed(self, after: int | None, last: int) -> dict[str, list[int]]:
        """Return the rows of each table that change after a version."""
        found: dict[str, set[int]] = {fqn: set() for fqn in self.tables}
        for version in range(0 if after is None else after + 1, last + 1):
            for part in self.stream.entry(version)["parts"]:
                tensors = page.tensors_of(self.stream.objects[part["name"]])
                for number, block in enumerate(part["blocks"]):
                    found[block["table"]].update(page.ids_of(number, block, tensors))
        return {fqn: sorted(each) for fqn, each in found.items()}

    def fork(self, stream: str, **changes: Any) -> int:
        """Append a claim that starts another stream."""
        self._id, self._snapshot = stream, None
        before = self.stream.entry(self._version)
        origin = {"stream": before["stream"], **self.stream.link(self._version)}
        return self.claim(**{"forked_from": origin} | changes)

    def _append(self, changes: Entry) -> int:
        self._version += 1
        entry = self._entry() | changes
        self.stream.objects[entry_name(self._version)] = to_bytes(entry)
        return self._version

    def _entry(self) -> Entry:
        return {
            "format": self.format,
            "stream": self._id,
            "generation": self._generation,
            "writer": f"{self._generation:032x}",
            "version": self._version,
            "kind": "delta",
            "parent": self.stream.link(self._version - 1) if self.stream.versions else None,
            "snapshot": self._snapshot,
            "batches": [self._batches, self._batches],
            "cut": self._batches + 0.25,
            "created": self._batches + 0.5,
            "pending_rows": 0,
            "tables": {},
            "dense": {},
            "parts": [],
            "merges": None,
        }

    def _version_of(self, kind: str, version: int, parts: Sequence[Part]) -> Entry:
        dense = {
            name: {"dtype": each.dtype, "shape": each.shape} for part in parts for name, each in part.dense.items()
        }
        found: Entry = {"kind": kind, "tables": self.tables, "dense": dense}
        found["parts"] = [self.put(part, version) for part in parts]
        return found | ({"event_time": None, "training": [], "owners": {}} if self.format == 2 else {})

    def put(self, part: Part, version: int) -> dict[str, Any]:
        """Write a part and return its record."""
        self._num_parts += 1
        name = f"parts/{version:020d}-g{self._generation}-r0-{self._num_parts:016x}.safetensors"
        record: dict[str, Any] = {"name": name, "blocks": [each.record for each in part.blocks], "dense": [*part.dense]}
        tensors = {
            f"{index}.{key}": each for index, block in enumerate(part.blocks) for key, each in block.tensors.items()
        }
        tensors |= {f"dense.{index}": each for index, each in enumerate(part.dense.values())}
        if self.format == 1:
            data = file_of(tensors)
            record |= {"num_bytes": len(data), "xxh3": xxh3(data)}
        else:
            data = file_with_digests(tensors)
            seal(record, data)
            has_states = any(self.tables[each.record["table"]]["states"] for each in part.blocks)
            missing = {"name": name.replace("r0", "r0s"), "num_bytes": 1016, "body": 1000, "xxh3": "0" * 32}
            record["states"] = missing if has_states else None
        self.stream.objects[name] = data
        return record


def packed(ids: Sequence[int]) -> Tensors:
    """Return the tensors of ids in the form ``gaps``."""
    skipped = [row - before - 1 for before, row in zip([-1, *ids], ids, strict=False)]
    gaps = zlib.compress(bytes(min(each, 255) for each in skipped))
    escapes = np.array([each for each in skipped if each >= 255], "<i8")
    return {"gaps": Tensor("U8", (len(gaps),), gaps), "escapes": Tensor.of(escapes, "I64")}


@functools.cache
def _plain() -> Maker:
    maker = Maker({"t": table(10, 4), "h": table(6, 8, "BF16"), "u": table(600, 2, "F16")})
    maker.claim()
    dense = {
        "w": Tensor.of(np.arange(6.0).reshape(2, 3), "F32"),
        "flags": Tensor("BOOL", (3,), b"\1\0\1"),
        "n": Tensor.of(np.array(7), "I64"),
    }
    first = [maker.block("t", rows=(0, 5)), maker.block("u", columns=(0, 1))]
    second = [maker.block("t", rows=(5, 10)), maker.block("u", columns=(1, 2)), maker.block("h")]
    maker.snapshot([Part(first, dense), Part(second)])
    maker.delta(maker.block("t", [1, 3, 7]), maker.block("u", [0, 255, 599], form="gaps"))
    blocks = [
        maker.block("t", [0, 4, 9]),
        maker.block("h", [2, 5], encoding="INT4"),
        maker.block("u", [3, 259, 260, 599], form="gaps", encoding="INT8"),
    ]
    maker.commit("delta", [Part(blocks, dense | {"n": Tensor.of(np.array(8), "I64")}), Part()])
    return maker


def plain() -> Stream:
    """Return a stream of format 1: a claim, a snapshot of two parts, and the deltas 2 and 3."""
    return plain_maker().stream


def plain_maker() -> Maker:
    """Return the publisher of :func:`plain`."""
    return copy.deepcopy(_plain())


@functools.cache
def _owned() -> Maker:
    maker = Maker(
        {
            "t": table_2(10, 4, has_states=True),
            "r": table_2(8, 2, identity=identity(100, (0, 5, 4), (5, 8, 7))),
            "s": table_2(6, 2, "F16", identity=identity(0, (0, 3, None), (3, 6, None))),
        }
    )
    maker.claim()
    maker.owners["r"][[0, 2, 5]] = 3, 101 - 1, 60  # 100 is in bucket 100 % 2
    maker.owners["s"][[1, 4]] = -2, 7
    maker.snapshot()
    maker.owners["r"][[1, 2]] = 49, NO_OWNER
    maker.delta(maker.block("t", [1, 3]), maker.block("r", [1, 2, 4]), maker.block("s", [1], form="gaps"))
    maker.owners["r"][[0, 3]] = NO_OWNER, 3
    maker.owners["s"][5] = 9
    maker.delta(maker.block("r", [0, 3], form="gaps"), maker.block("s", [5]), maker.block("t", [0, 9]))
    return maker


def owned() -> Stream:
    """Return a stream of format 2 with two tables with raw ids: a claim, a snapshot, and the deltas 2 and 3."""
    return owned_maker().stream


def owned_maker() -> Maker:
    """Return the publisher of :func:`owned`."""
    return copy.deepcopy(_owned())
