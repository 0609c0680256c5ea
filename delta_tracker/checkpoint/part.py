"""The saved state of one rank: plain tensors, one of which is a header of JSON. Nothing in it is ever unpickled.

Every key starts with ``rank{rank}of{world_size}/``, so that no two ranks share one: ``torch.distributed.checkpoint``
silently keeps a single copy of what several ranks save under the same key. Behind that stand

- ``header``: ``[B]`` uint8, the JSON that :class:`Part` is made of;
- ``rows/{set}/{table}/ids``: ``[N]`` int32 (int64 for tables of 2^31 rows and more), global, ascending and unique. A
  set is a consumer, by its place in the header, or ``history``; a table without rows has no tensors;
- ``.../known``: ``[N]`` bool, which old states are known; missing if all are, or none are kept;
- ``.../states``: ``[K, S]``, the old states of the known rows, in the modes that keep them;
- ``.../ages``: ``[N]`` int32, how many reads have left each row out; missing if none has;
- ``counters/{name}/{field}``: the tensors of what was registered to be saved with the tracker.

Letters: ``N`` rows, ``K`` of them with a known state, ``S`` numbers in an old state, ``B`` bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from delta_tracker.changes import LogState
from delta_tracker.errors import InvalidArgumentError, MalformedStateError, StateMismatchError, UnknownFormatError
from delta_tracker.rows import ChangedRows
from delta_tracker.types import ShardSpec, TableSpec

FORMAT_VERSION = 1
HEADER = re.compile(r"rank(\d+)of(\d+)/header")
HISTORY = "history"
_COLUMNS = ("ids", "known", "states", "ages")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}

# What of a tensor can be known before it is read.
Layout = tuple[torch.dtype, tuple[int, ...]]
# Name to field to tensor, or to anything that JSON can hold.
Counters = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SavedConsumer:
    """A consumer without its rows.

    Args:
        name: its name.
        batch: ``step()`` count at its last committed read.
        is_behind: its changes were given up to bound memory.
    """

    name: str
    batch: int
    is_behind: bool


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The header of one rank's saved state.

    Args:
        rank: who saved it.
        world_size: among how many.
        mode: value of the :class:`~delta_tracker.types.TrackingMode`.
        num_batches: ``step()`` calls.
        shards: table FQN to the block that the rank held.
        consumers: in the order of their row sets.
        has_history: a row set holds all rows changed since the start.
        annotations: consumer to what was noted of it.
        counters: name to those of its fields that are not tensors.
        layouts: tensor name, without the rank, to what it is.
    """

    rank: int
    world_size: int
    mode: str
    num_batches: int
    shards: Mapping[str, ShardSpec]
    consumers: tuple[SavedConsumer, ...]
    has_history: bool
    annotations: Mapping[str, object]
    counters: Mapping[str, Mapping[str, object]]
    layouts: Mapping[str, Layout]

    @property
    def prefix(self) -> str:
        """What all its keys start with."""
        return f"rank{self.rank}of{self.world_size}/"

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of its row sets: one for each consumer, in order, and the history."""
        return (*(str(place) for place in range(len(self.consumers))), *([HISTORY] if self.has_history else []))

    def row_names(self, row_set: str, fqn: str) -> list[str]:
        """Names of the tensors that hold a set's rows of a table; none if there are no rows."""
        return [name for name in (f"rows/{row_set}/{fqn}/{column}" for column in _COLUMNS) if name in self.layouts]

    def counter_names(self) -> list[str]:
        """Names of the tensors of its counters."""
        return [name for name in self.layouts if name.startswith("counters/")]

    def rows(self, row_set: str, fqn: str, tensors: Mapping[str, Tensor]) -> ChangedRows | None:
        """A set's rows of a table, with global ids; None if there are none.

        Args:
            row_set: one of :attr:`sets`.
            fqn: the table.
            tensors: key, with the rank, to tensor.

        Raises:
            MalformedStateError: unless they are rows of the block that the rank held.
        """
        read = {name.rpartition("/")[2]: tensors[self.prefix + name] for name in self.row_names(row_set, fqn)}
        if not read:
            return None
        ids = read["ids"].long()
        spec, size = self.shards[fqn], len(ids)
        is_inside = size > 0 and int(ids[0]) >= spec.row_offset and int(ids[-1]) < spec.row_offset + spec.num_rows
        if not is_inside or not bool((ids[1:] > ids[:-1]).all()):
            raise MalformedStateError(self.prefix, f"ids of {fqn!r} are not rows of its shard in ascending order")
        known, states = read.get("known"), None
        if "states" in read:
            known = torch.ones(size, dtype=torch.bool) if known is None else known
            if known.shape != (size,) or len(read["states"]) != int(known.sum()):
                raise MalformedStateError(self.prefix, f"there is not one old state for each known row of {fqn!r}")
            states = read["states"].new_full((size, read["states"].shape[1]), torch.nan)
            states[known] = read["states"]
        if "ages" in read and read["ages"].shape != (size,):
            raise MalformedStateError(self.prefix, f"there is not one age for each row of {fqn!r}")
        return ChangedRows(ids, states, known, read.get("ages"))

    def counter(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """The fields of a counter; None if it has none of that name."""
        if name not in self.counters:
            return None
        start = f"counters/{name}/"
        found = {key[len(start) :]: tensors[self.prefix + key] for key in self.layouts if key.startswith(start)}
        return {**self.counters[name], **found}


def pack(
    rank: int,
    world_size: int,
    mode: str,
    shards: Mapping[str, ShardSpec],
    state: LogState,
    annotations: Mapping[str, object],
    counters: Counters,
) -> dict[str, Tensor]:
    """What a rank saves: key to CPU tensor.

    Args:
        rank: who saves.
        world_size: among how many.
        mode: value of the tracking mode.
        shards: table FQN to the block that the rank holds.
        state: what the rank's log knows, with local ids.
        annotations: consumer to JSON.
        counters: what else is saved.

    Raises:
        InvalidArgumentError: for a counter with anything else than tensors and JSON.
    """
    sets = {str(place): consumer.rows for place, consumer in enumerate(state.consumers.values())}
    if state.history is not None:
        sets[HISTORY] = state.history
    tensors = {
        f"rows/{row_set}/{fqn}/{column}": tensor
        for row_set, tables in sets.items()
        for fqn, rows in tables.items()
        for column, tensor in _columns(rows, shards[fqn])
    }
    header = {
        "version": FORMAT_VERSION,
        "rank": rank,
        "world_size": world_size,
        "mode": mode,
        "num_batches": state.num_batches,
        "shards": {fqn: _shard_json(spec) for fqn, spec in shards.items()},
        "consumers": [[name, each.batch, each.is_behind] for name, each in state.consumers.items()],
        "has_history": state.history is not None,
        "annotations": dict(annotations),
    }
    return _encode(header, tensors, counters)


def replace_counters(part: Part, saved: Mapping[str, Tensor], counters: Counters) -> dict[str, Tensor]:
    """The same part with other counters.

    Args:
        part: its header.
        saved: key, with the rank, to tensor, of this part and possibly others.
        counters: name to fields.
    """
    header = json.loads(bytes(saved[f"{part.prefix}header"].numpy()))
    tensors = {name: saved[part.prefix + name] for name in part.layouts if not name.startswith("counters/")}
    return _encode(header, tensors, counters)


def _encode(header: dict[str, object], rows: Mapping[str, Tensor], counters: Counters) -> dict[str, Tensor]:
    tensors = dict(rows)
    plain: dict[str, dict[str, object]] = {name: {} for name in counters}
    for name, fields in counters.items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                tensors[f"counters/{name}/{field}"] = value.detach().cpu()
            else:
                plain[name][field] = value
    layouts = {name: [_dtype_name(each.dtype), list(each.shape)] for name, each in tensors.items()}
    try:
        encoded = json.dumps({**header, "counters": plain, "layouts": layouts}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        remedy = f"Let each counter's state_dict hold tensors and what JSON can hold: {error}"
        raise InvalidArgumentError("counters", sorted(counters), remedy) from error
    prefix = f"rank{header['rank']}of{header['world_size']}/"
    return {
        f"{prefix}header": torch.frombuffer(bytearray(encoded), dtype=torch.uint8),
        **{prefix + name: tensor for name, tensor in tensors.items()},
    }


def _columns(rows: ChangedRows, spec: ShardSpec) -> Iterator[tuple[str, Tensor]]:
    if not len(rows):
        return
    ids = rows.ids.cpu() + spec.row_offset
    yield "ids", ids.int() if spec.table.num_rows <= torch.iinfo(torch.int32).max else ids
    if rows.states is not None and rows.known is not None:
        known = rows.known.cpu()
        if not bool(known.all()):
            yield "known", known
        yield "states", rows.states.cpu()[known]
    if rows.ages is not None and bool(rows.ages.any()):
        yield "ages", rows.ages.cpu()


def parse(key: str, header: Tensor) -> Part:
    """Read the header under ``key``.

    Raises:
        UnknownFormatError: if its format version is another one.
        MalformedStateError: if it does not follow the format.
    """
    try:
        found = json.loads(header.cpu().numpy().tobytes())
        version = found["version"]
        part = _part(found) if version == FORMAT_VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedStateError(key, f"its header cannot be read: {type(error).__name__}: {error}") from error
    if part is None:
        raise UnknownFormatError(version, FORMAT_VERSION)
    if f"{part.prefix}header" != key or part.rank >= part.world_size:
        raise MalformedStateError(key, f"its header says that it is {part.prefix!r}")
    return part


def _part(found: Mapping[str, Any]) -> Part:
    return Part(
        rank=_whole(found["rank"]),
        world_size=_whole(found["world_size"]),
        mode=str(found["mode"]),
        num_batches=_whole(found["num_batches"]),
        shards={fqn: _shard(fqn, each) for fqn, each in found["shards"].items()},
        consumers=tuple(SavedConsumer(str(name), _whole(n), bool(b)) for name, n, b in found["consumers"]),
        has_history=bool(found["has_history"]),
        annotations=dict(found["annotations"]),
        counters={name: dict(fields) for name, fields in found["counters"].items()},
        layouts={
            name: (_DTYPES[dtype], tuple(_whole(size) for size in shape))
            for name, (dtype, shape) in found["layouts"].items()
        },
    )


def check_alike(parts: Sequence[Part]) -> None:
    """Refuse parts that were not saved together.

    Raises:
        StateMismatchError: naming what differs between ranks.
    """
    first = parts[0]
    for part in parts[1:]:
        for what, saved, found in (
            ("world size", part.world_size, first.world_size),
            ("mode", part.mode, first.mode),
            ("consumers", [each.name for each in part.consumers], [each.name for each in first.consumers]),
            ("history", part.has_history, first.has_history),
        ):
            if saved != found:
                raise StateMismatchError(f"on rank {part.rank} {what}", saved, f"{found} as on rank {first.rank}")
        check_tables(f"on rank {part.rank} ", part.shards, first.shards)


def check_tables(where: str, saved: Mapping[str, ShardSpec], expected: Mapping[str, ShardSpec]) -> None:
    """Refuse other tables, sizes or dtypes.

    Raises:
        StateMismatchError: naming every table that differs.
    """
    both = [{fqn: str(spec.table) for fqn, spec in shards.items()} for shards in (saved, expected)]
    differing = sorted(fqn for fqn in both[0].keys() | both[1].keys() if both[0].get(fqn) != both[1].get(fqn))
    if differing:
        listed = [", ".join(f"{fqn!r}: {tables.get(fqn, 'nothing')}" for fqn in differing) for tables in both]
        raise StateMismatchError(f"{where}tables", f"({listed[0]})", f"({listed[1]})")


def _shard_json(spec: ShardSpec) -> list[object]:
    table = spec.table
    columns = [list(each) for each in spec.columns]
    return [
        *(table.num_rows, table.dim, _dtype_name(table.dtype)),
        *(spec.row_offset, spec.num_rows, columns, spec.is_replicated),
    ]


def _shard(fqn: str, saved: Sequence[Any]) -> ShardSpec:
    num_rows, dim, dtype, row_offset, num_held, columns, is_replicated = saved
    table = TableSpec(fqn, _whole(num_rows), _whole(dim), _DTYPES[dtype])
    ranges = tuple((_whole(start), _whole(stop)) for start, stop in columns)
    return ShardSpec(table, _whole(row_offset), _whole(num_held), ranges, bool(is_replicated))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
