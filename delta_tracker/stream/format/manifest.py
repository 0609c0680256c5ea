"""Manifests, which are the records of a stream's versions, and their names. ``stream/FORMAT.md`` specifies the JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from msgspec import Meta, to_builtins

from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.field_types import Count, Hex, Range
from delta_tracker.stream.store_clock import SKEW_SECONDS
from delta_tracker.types import ITEM_BYTES, Identity, TableSpec, TableStates, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

_Item = TypeVar("_Item")

FORMAT = 1  # values only
STATES_FORMAT = 2  # values, the optimizer's states and the raw ids of the same rows, and the training state
Kind = Literal["claim", "snapshot", "delta"]
# Storage of a block's row ids: all rows of its range, a list of ids, or compressed gaps between ids.
IdForm = Literal["all", "list", "gaps"]
Schema = tuple[int, Mapping[str, TableSpec], Mapping[str, TableStates], Mapping[str, Identity]]

MAX_DIMS = 16
PartName = Annotated[str, Meta(pattern=r"\Aparts/[0-9a-z-]+\.safetensors\Z")]
DENSE_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Torch names of the dtypes of dense tensors, by their names in the format."""
DTYPE_NAMES = {name: stored for stored, name in DENSE_DTYPES.items()}

MAX_ENTRY_BYTES = 64 << 20  # a manifest has about 300 bytes per rank and table
_DIGITS = 20  # zero-padded, so that names sort by version, up to 2**63
ENTRY_NAME = re.compile(rf"log/([0-9]{{{_DIGITS}}})\.json")
_MERGED_NAME = re.compile(rf"merged/([0-9]{{{_DIGITS}}})-([0-9]{{{_DIGITS}}})-(delta|snapshot)\.json")


@dataclass(frozen=True, slots=True)
class Block:
    """Record of a block, which contains some or all rows of a row range of one table, limited to a column range."""

    table: str  # FQN
    rows: Range  # half-open range of global row ids
    columns: Range  # half-open range
    num_rows: Count
    ids: IdForm  # `all` if the block holds all rows of its range
    encoding: Encoding

    @property
    def num_columns(self) -> int:
        """Number of columns in the column range."""
        return self.columns[1] - self.columns[0]

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one stored row, without its id."""
        return self.encoding.width(self.num_columns) * ITEM_BYTES[self.encoding.dtype_name]


@dataclass(frozen=True, slots=True)
class Stored:
    """Record of an object of format 2 that is not a part: the row states of a part, or the training state of a rank."""

    name: PartName
    num_bytes: Count
    body: Count
    xxh3: Hex


@dataclass(frozen=True, slots=True)
class Part:
    """Record of a part: an object with rows and dense tensors, written by one rank or by a compaction."""

    name: PartName  # name of the object in the store
    num_bytes: Count  # size of the object in bytes
    xxh3: Hex  # 128-bit xxh3 of the object's bytes from `body` on, in hex
    blocks: tuple[Block, ...]
    dense: tuple[str, ...]  # names of the dense tensors in the part
    # number of bytes before the digests of the pieces, at least 1; 0 in format 1, which has no such digests
    body: Count = 0
    # record of the object with the optimizer's states of the same rows; None if no table has states
    states: Stored | None = None
    # 128-bit xxh3 of each tensor before these digests, in hex and in the order of the object; empty if it has none
    tensors: tuple[Hex, ...] = ()

    def narrowed(self, takes: Callable[[str], bool]) -> Part:
        """Return the record with only the tables and dense tensors for which ``takes(name)`` returns True."""
        blocks = tuple([block for block in self.blocks if takes(block.table)])
        dense = tuple([name for name in self.dense if takes(name)])
        if (len(blocks), len(dense)) == (len(self.blocks), len(self.dense)):
            return self
        return replace(self, blocks=blocks, dense=dense)


@dataclass(frozen=True, slots=True, init=False)
class DenseSpec:
    """Dtype and shape of a dense parameter or buffer."""

    dtype_name: str  # in torch, such as `float32`
    shape: tuple[int, ...]

    def __init__(self, dtype: torch.dtype | str, shape: tuple[int, ...]) -> None:
        object.__setattr__(self, "dtype_name", dtype_name(dtype))
        object.__setattr__(self, "shape", shape)

    @property
    def dtype(self) -> torch.dtype:
        """The ``torch.dtype`` with the name :attr:`dtype_name`."""
        return torch_dtype(self.dtype_name)

    def __str__(self) -> str:
        return f"{self.dtype_name} {list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]


@dataclass(frozen=True, slots=True)
class Link:
    """Reference to an entry of the log: its version and the 128-bit xxh3 of its bytes, in hex."""

    version: Count
    xxh3: Hex


@dataclass(frozen=True, slots=True)
class Fork:
    """Reference to the last entry of a former stream, stored in the claim that starts the next stream."""

    stream: Hex
    version: Count
    xxh3: Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of one version in the log, or of the versions that a compaction merged."""

    # The fields up to `forked_from` are in the order of their JSON.
    # 1, or 2 for a version with the optimizer's states or with raw ids
    format: int = FORMAT
    stream: str  # id of the stream, 32 hex digits
    generation: int  # generation of the publisher that wrote the version
    writer: str  # id of that publisher, 32 hex digits
    version: int  # index in the log
    kind: Kind
    # version of the newest snapshot up to and including this version; None before the first
    snapshot: int | None = None
    # half-open range of the trainer's step counts that the version covers. The rows were read at its end.
    batches: tuple[int, int] = (0, 0)
    cut: float = 0.0  # Unix time at which the rows were read, in seconds
    created: float  # Unix time of the commit by the publisher's clock, in seconds
    pending_rows: int = 0  # number of changed rows that are left for later versions
    # in format 2, smallest event time of the batch that any rank trained last, in seconds; None if it is unknown
    event_time: float | None = None
    parent: Link | None = None  # link to the preceding entry; None at the start of a log and in a merged snapshot
    # in a merged entry, which replaces the versions after `parent` up to `version`, link to the log entry of `version`
    merges: Link | None = None
    tables: Mapping[str, TableSpec] = field(default_factory=dict)  # FQN to spec
    dense: Mapping[str, DenseSpec] = field(default_factory=dict)  # name to spec of the dense parameters and buffers
    # objects with the rows and dense tensors. Apply blocks with all rows of their range before blocks that list rows.
    parts: tuple[Part, ...] = ()
    training: tuple[Stored, ...] = ()  # in format 2, records of the training states of all ranks, in their order
    # for a claim that starts a stream after the last entry of another one, reference to that entry
    forked_from: Fork | None = None
    # FQN to the states of the table's rows, for each table with a fused optimizer; empty in format 1
    states: Mapping[str, TableStates] = field(default_factory=dict)
    # FQN to the rule for raw ids, for each table with managed collisions; empty in format 1
    identities: Mapping[str, Identity] = field(default_factory=dict)
    # FQN to the numbers of rows that a raw id was admitted to, and evicted from, since the version before; informative.
    # Empty in format 1 and in a merged entry.
    owner_changes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # 128-bit xxh3 of the entry's bytes, in hex; empty before the entry is parsed from its bytes
    xxh3: str = field(default="", compare=False)
    # Unix time of the commit by the store's clock, in seconds; None if the entry was not read from a store
    modified: float | None = field(default=None, compare=False)

    @property
    def committed(self) -> float:
        """Unix time of the commit, from the store's clock if :attr:`modified` is set, else from the publisher's."""
        return self.created if self.modified is None else self.modified

    @property
    def skew(self) -> float:
        """Publisher's clock minus the store's clock at the commit, in seconds; 0 if the store's time is unknown.

        The difference includes the duration of the commit. It is negative if the entry was copied to the store later.
        """
        return self.created - self.committed

    def seconds_since(self, before: Manifest) -> float:
        """Return the seconds (0 or more) from the commit of ``before``, the preceding entry, to that of this entry.

        Uses the publisher's clock, because a store may truncate its times to seconds, and copies of objects have new
        times. Uses the store's times if the entries have different publishers, or if a clock was set in between.
        """
        by_publisher, by_store = self.created - before.created, self.committed - before.committed
        is_set = self.writer != before.writer or abs(by_publisher - by_store) > SKEW_SECONDS
        return max(0.0, by_store if is_set else by_publisher)

    @property
    def link(self) -> Link:
        """Link to the log entry of :attr:`version`. The next entry stores this link as its parent."""
        return self.merges or Link(self.version, self.xxh3)

    @property
    def num_rows(self) -> int:
        """Number of rows in all blocks. A row is counted once per block, for example once per column shard."""
        return sum(block.num_rows for part in self.parts for block in part.blocks)

    @property
    def rows_by_table(self) -> dict[str, int]:
        """Number of rows of each table that has blocks, keyed by FQN and counted as in :attr:`num_rows`."""
        found: dict[str, int] = {}
        for part in self.parts:
            for block in part.blocks:
                found[block.table] = found.get(block.table, 0) + block.num_rows
        return found

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all parts, without the states of their rows."""
        return sum(map(attrgetter("num_bytes"), self.parts))

    @property
    def objects(self) -> tuple[Part | Stored, ...]:
        """All objects that the entry names: its parts, the states of their rows, and the training states."""
        states = tuple(part.states for part in self.parts if part.states is not None)
        return (*self.parts, *states, *self.training)

    @property
    def total_bytes(self) -> int:
        """Size in bytes of all objects."""
        return sum(each.num_bytes for each in self.objects)

    @property
    def schema(self) -> Schema:
        """Format, tables, states and identities. A delta has the same schema as the preceding version."""
        return self.format, self.tables, self.states, self.identities

    def narrowed(self, takes: Callable[[str], bool]) -> Manifest:
        """Return the entry with only the tables and dense tensors for which ``takes(name)`` returns True."""

        def of(items: Mapping[str, _Item]) -> dict[str, _Item]:
            return {name: item for name, item in items.items() if takes(name)}

        return replace(
            self,
            tables=of(self.tables),
            dense=of(self.dense),
            states=of(self.states),
            identities=of(self.identities),
            owner_changes=of(self.owner_changes),
            parts=tuple(part for each in self.parts if (part := each.narrowed(takes)).blocks or part.dense),
        )

    def to_json(self) -> bytes:
        """Return the bytes of the entry as they are stored in the log."""
        entry = to_builtins(self, enc_hook=dict)
        states, identities, owners = map(entry.pop, ("states", "identities", "owner_changes"))
        del entry["xxh3"], entry["modified"]
        if self.forked_from is None:
            del entry["forked_from"]
        has_states = self.format == STATES_FORMAT
        for spec in entry["dense"].values():
            spec["dtype"], spec["shape"] = DTYPE_NAMES[spec.pop("dtype_name")], spec.pop("shape")
        for table in entry["tables"].values():
            fqn, table["dtype"] = table.pop("fqn"), DTYPE_NAMES[table.pop("dtype_name")]
            if has_states:
                table.update(columns=((0, table["dim"]),), optimizer=None, states=())
                table.update(states.get(fqn, {}))
                for state in table["states"]:
                    state["dtype"], state["width"] = DTYPE_NAMES[state.pop("dtype_name")], state.pop("width")
                table["identity"] = {"dtype": "I64", **identities[fqn]} if fqn in identities else None
        if has_states:
            entry["owners"] = {fqn: {"admitted": new, "evicted": old} for fqn, (new, old) in owners.items()}
        else:
            del entry["event_time"], entry["training"]
        for part in entry["parts"]:
            if not has_states:
                del part["body"], part["states"]
            if not part["tensors"]:
                del part["tensors"]
        return json.dumps(entry, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Merged:
    """Reference to a merged entry that replaces the versions from ``first`` (0 for a snapshot) to ``last``."""

    last: int
    first: int
    kind: str

    @property
    def name(self) -> str:
        """Name of the entry in the store; names sort by ``last``."""
        return f"merged/{self.last:0{_DIGITS}d}-{self.first:0{_DIGITS}d}-{self.kind}.json"

    @classmethod
    def of(cls, manifest: Manifest) -> Merged:
        """Return the reference to the merged entry ``manifest``."""
        first = 0 if manifest.parent is None else manifest.parent.version + 1
        return cls(manifest.version, first, manifest.kind)

    @classmethod
    def named(cls, name: str) -> Merged | None:
        """Return the reference to the merged entry called ``name``; None for any other name."""
        match = _MERGED_NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])


def entry_name(version: int) -> str:
    """Return the name of the object that contains the entry of ``version``."""
    return f"log/{version:0{_DIGITS}d}.json"
