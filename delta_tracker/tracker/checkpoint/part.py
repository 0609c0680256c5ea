"""Format of a *part* of the tracker's checkpoint: the saved state of one rank.

A part consists of plain tensors, one of which contains a JSON header. Loading a part never unpickles data.

Every key starts with the prefix ``rank{rank}of{world_size}/``, so that different ranks have different keys: if several
ranks save the same key, ``torch.distributed.checkpoint`` (DCP) silently keeps only one copy. The prefix is followed by
one of these names:

- ``header``: ``[B]`` uint8, the JSON of :class:`RankHeader`. It contains a digest of every other tensor of the part.
- ``rows/{table}``: ``[B]`` uint8, the table's rows in all row sets. There is only one such tensor per table, because
  DCP's plan contains an entry for every tensor.
- ``counters/{name}/{field}``: tensors of the registered counters. The header contains the fields of a counter that are
  not tensors, and its kind. See :mod:`delta_tracker.tracker.checkpoint.counters`.

A *row set* contains the pending rows of one consumer. Its name is the index of this consumer in the header. The row set
``history`` contains all rows changed since the tracker was created. In a ``rows/{table}`` tensor, a row set consists of
up to five *pieces*:

- ``ids``: ``[N]`` int32 (int64 for tables of 2^31 rows and more), global, ascending and unique;
- ``known``: ``[N]`` bool, True where the old state is known; missing if all are known or the mode keeps no old states;
- ``states``: ``[K, S]``, the known old states, in the modes that keep old states;
- ``ages``: ``[N]`` int32, the number of reads in which top-k left the row out; missing if all are 0;
- ``former``: ``[N]`` int64, the raw id of the row at the consumer's last committed read, 2^63 - 1 if the row had no raw
  id or its raw id is unknown; missing for tables without managed collisions.

The pieces of all row sets are concatenated in the header's order, each padded to a multiple of 8 bytes.

Notation: ``N`` is the number of rows in a row set, ``K`` the number of these rows whose old state is known, ``S`` the
number of values in an old state, ``B`` a number of bytes.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import xxhash
from msgspec import Meta, Struct, convert
from torch import Tensor

from delta_tracker.errors import OR_NOTHING, CheckpointError, InvalidArgumentError, StateMismatchError
from delta_tracker.rows import ChangedRows
from delta_tracker.tracker.cursors import LogState
from delta_tracker.types import ShardSpec, TableSpec, dtype_name

FORMAT_VERSION = 1
HEADER = re.compile(r"rank(\d+)of(\d+)/header")
HISTORY = "history"
ALIGNMENT = 8
DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}

# Mapping from column name to number of dimensions and allowed dtypes; an empty tuple allows all dtypes.
_COLUMNS: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
    "ids": (1, (torch.int32, torch.int64)),
    "known": (1, (torch.bool,)),
    "states": (2, ()),
    "ages": (1, (torch.int32,)),
    "former": (1, (torch.int64,)),
}

# Mapping from counter name to the counter's fields: a mapping from field name to tensor or JSON value.
Counters = Mapping[str, Mapping[str, Any]]

# dtype and shape of a tensor.
Layout = tuple[torch.dtype, tuple[int, ...]]

_Count = Annotated[int, Meta(ge=0)]


class SavedConsumer(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Description of a consumer in the header of a part. The header does not contain the consumer's rows.

    Args:
        name: the consumer's name.
        batch: ``step()`` count at the consumer's last committed read.
        was_dropped: True if the consumer was dropped and needs a snapshot.
    """

    name: str
    batch: _Count
    was_dropped: bool


class Piece(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Layout of one piece of a ``rows/{table}`` tensor. A piece is one column of a row set, such as the ids.

    Raises ValueError if the dtype or the number of dimensions is wrong for the column.

    Args:
        row_set: name of the row set.
        column: ``ids``, ``known``, ``states``, ``ages`` or ``former``.
        dtype: dtype of the column.
        shape: shape of the column.
    """

    row_set: str
    column: str
    dtype: torch.dtype
    shape: tuple[_Count, ...]

    def __post_init__(self) -> None:
        num_dims, dtypes = _COLUMNS[self.column]
        if len(self.shape) != num_dims or (dtypes and self.dtype not in dtypes):
            raise ValueError(f"{self.column} are {self.dtype} of shape {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Size of the piece in bytes, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Size of the piece in bytes, with padding."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


class RankHeader(Struct, kw_only=True, frozen=True, eq=False):
    """Header of the saved state (part) of one rank. It is saved as a JSON object of these fields and ``version``.

    Args:
        rank: rank that saved the part.
        world_size: number of ranks that saved parts.
        mode: value of the :class:`~delta_tracker.types.TrackingMode`.
        num_batches: number of ``step()`` calls.
        shards: spec of the rank's shard of each table, by table FQN.
        consumers: descriptions of the consumers, in the order of their row sets.
        has_history: True if the part contains the row set ``history``.
        annotations: note of each consumer that has a note, by consumer name.
        counters: values of the counters that are not tensors, by counter name and field name.
        counter_kinds: kind of each counter, by counter name.
        layouts: dtype and shape of each counter tensor, by key without prefix.
        pieces: pieces of each ``rows/{table}`` tensor in order, by table FQN.
        digests: :func:`digest` of each tensor, by key without prefix.
    """

    rank: _Count
    world_size: _Count
    mode: str
    num_batches: _Count
    shards: dict[str, ShardSpec]
    consumers: tuple[SavedConsumer, ...]
    has_history: bool
    annotations: dict[str, object]
    counters: dict[str, dict[str, object]]
    counter_kinds: dict[str, dict[str, object]]
    layouts: dict[str, tuple[torch.dtype, tuple[_Count, ...]]]
    pieces: dict[str, tuple[Piece, ...]]
    digests: dict[str, str]

    @property
    def prefix(self) -> str:
        """Prefix of all keys of the part, including the slash at the end."""
        return f"rank{self.rank}of{self.world_size}/"

    def row_layouts(self, fqn: str) -> dict[str, Layout]:
        """Return the layout of a table's ``rows/{table}`` tensor, by key without prefix. Empty if there is none."""
        num_bytes = sum(piece.room for piece in self.pieces.get(fqn, ()))
        return {f"rows/{fqn}": (torch.uint8, (num_bytes,))} if num_bytes else {}

    def all_layouts(self) -> dict[str, Layout]:
        """Return the dtype and shape of every tensor except the header, by key without prefix, in the part's order."""
        rows = {name: layout for fqn in self.shards for name, layout in self.row_layouts(fqn).items()}
        return {**rows, **self.layouts}

    def rows(self, row_set: str, fqn: str, tensors: Mapping[str, Tensor]) -> ChangedRows | None:
        """Return the rows of the table ``fqn`` in a row set, with global ids. Return None if there are no rows.

        ``row_set`` is the index of a consumer, or ``history``. ``tensors`` contains the part's tensors by key with
        prefix. Raises CheckpointError if the tensor of the table does not contain valid rows of the rank's shard.
        """
        read, begin = {}, 0
        for piece in self.pieces.get(fqn, ()):
            if piece.row_set == row_set:
                table = tensors[f"{self.prefix}rows/{fqn}"]
                read[piece.column] = table[begin : begin + piece.num_bytes].clone().view(piece.dtype).view(piece.shape)
            begin += piece.room
        if not read:
            return None
        if "ids" not in read:
            raise CheckpointError(self.prefix, f"ids are missing for rows of {fqn!r}")
        ids = read["ids"].long()
        spec, size = self.shards[fqn], len(ids)
        is_inside = size > 0 and int(ids[0]) >= spec.row_offset and int(ids[-1]) < spec.row_offset + spec.num_rows
        if not is_inside or not bool((ids[1:] > ids[:-1]).all()):
            raise CheckpointError(self.prefix, f"ids of {fqn!r} are not rows of its shard in ascending order")
        known, states = read.get("known"), None
        if "states" in read:
            known = torch.ones(size, dtype=torch.bool, device="cpu") if known is None else known
            if known.shape != (size,) or len(read["states"]) != int(known.sum()):
                raise CheckpointError(self.prefix, f"numbers of old states and known rows differ for {fqn!r}")
            states = read["states"].new_full((size, read["states"].shape[1]), torch.nan)
            states[known] = read["states"]
        for column, what in (("ages", "ages"), ("former", "former owners")):
            if column in read and read[column].shape != (size,):
                raise CheckpointError(self.prefix, f"numbers of {what} and rows differ for {fqn!r}")
        return ChangedRows(ids, states, known, read.get("ages"), read.get("former"))

    def counter(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Return the fields of the counter ``name``, by field name, or None if the part does not contain the counter.

        ``tensors`` contains the part's tensors by key with prefix. The returned tensors are copies.
        """
        if name not in self.counters:
            return None
        start = f"{self.prefix}counters/{name}/"
        found = {field: tensors[start + field].clone() for field in self.counter_layouts(name)}
        return {**self.counters[name], **found}

    def counter_layouts(self, name: str) -> dict[str, Layout]:
        """Return the dtype and shape of each tensor of the counter ``name``, by field name."""
        start = f"counters/{name}/"
        return {key[len(start) :]: layout for key, layout in self.layouts.items() if key.startswith(start)}


def pack(
    rank: int,
    world_size: int,
    mode: str,
    shards: Mapping[str, ShardSpec],
    state: LogState,
    counters: Counters,
    kinds: Mapping[str, Mapping[str, object]],
) -> dict[str, Tensor]:
    """Encode the state of a rank as a part, and return the CPU tensors of the part by key.

    ``shards`` are the specs of the rank's shards, by table FQN. The row ids in ``state`` are local. ``counters`` are
    the fields of each counter, and ``kinds`` the kind of each counter, by name. Raises InvalidArgumentError if a field
    of a counter is neither a JSON value nor a tensor of a supported dtype.
    """
    sets = {str(index): consumer.rows for index, consumer in enumerate(state.consumers.values())}
    if state.history is not None:
        sets[HISTORY] = state.history
    pieces: dict[str, list[object]] = {}
    rows: dict[str, Tensor] = {}
    for fqn, spec in shards.items():
        found = [
            (row_set, column, tensor)
            for row_set, tables in sets.items()
            if fqn in tables
            for column, tensor in _columns(tables[fqn], spec)
        ]
        if found:
            pieces[fqn] = [[*names, dtype_name(each.dtype), list(each.shape)] for *names, each in found]
            rows[f"rows/{fqn}"] = torch.cat([_filled_up(tensor) for *_, tensor in found])
    tensors, plain = _split(counters)
    header = {
        "version": FORMAT_VERSION,
        "rank": rank,
        "world_size": world_size,
        "mode": mode,
        "num_batches": state.num_batches,
        "shards": {fqn: asdict(spec) for fqn, spec in shards.items()},
        "consumers": [[name, each.batch, each.was_dropped] for name, each in state.consumers.items()],
        "has_history": state.history is not None,
        "annotations": {name: each.note for name, each in state.consumers.items() if each.note is not None},
        "pieces": pieces,
        "counter_kinds": dict(kinds),
        "counters": plain,
        "layouts": {name: [dtype_name(each.dtype), list(each.shape)] for name, each in tensors.items()},
        "digests": {name: digest(each) for name, each in (*rows.items(), *tensors.items())},
    }
    try:
        encoded = json.dumps(header, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        remedy = f"Return only tensors and JSON values from each counter's state_dict: {error}"
        raise InvalidArgumentError("counters", sorted(counters), remedy) from error
    prefix = f"rank{rank}of{world_size}/"
    return {
        f"{prefix}header": torch.frombuffer(bytearray(encoded), dtype=torch.uint8),
        **{prefix + name: tensor for name, tensor in (*rows.items(), *tensors.items())},
    }


def _split(counters: Counters) -> tuple[dict[str, Tensor], dict[str, dict[str, object]]]:
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, object]] = {name: {} for name in counters}
    for name, fields in counters.items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                tensors[f"counters/{name}/{field}"] = value.detach().to("cpu", copy=True)
            else:
                plain[name][field] = value
    if strange := sorted(name for name, each in tensors.items() if dtype_name(each.dtype) not in DTYPES):
        raise InvalidArgumentError("counters", strange, f"Use tensors of the dtypes {sorted(DTYPES)}")
    return tensors, plain


def _filled_up(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a 1-D uint8 tensor, padded with zeros to a multiple of ``ALIGNMENT``."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))


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
    if rows.former is not None:
        yield "former", rows.former.cpu()


def parse(key: str, header: Tensor) -> RankHeader:
    """Parse the ``[B]`` uint8 tensor ``header`` that was saved under ``key``.

    Raises StateMismatchError if the format version of the header is unknown. Raises CheckpointError if the header is
    invalid, or if ``key`` is not the key of its rank.
    """
    try:
        found = json.loads(header.cpu().numpy().tobytes())
        version = found["version"]
        part = convert(_named(found), RankHeader, dec_hook=_decoded) if version == FORMAT_VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(key, f"its header cannot be read: {type(error).__name__}: {error}") from error
    if part is None:
        remedy = "Load it with the release of delta_tracker that wrote it"
        raise StateMismatchError("format version", version, FORMAT_VERSION).with_remedy(remedy)
    if f"{part.prefix}header" != key or part.rank >= part.world_size:
        raise CheckpointError(key, f"its header says that it is {part.prefix!r}")
    return part


def parse_all(state: Mapping[str, Tensor]) -> list[RankHeader]:
    """Parse the headers of all parts in ``state``, which contains the saved tensors by key.

    Raises InvalidArgumentError if ``state`` is not a mapping, and CheckpointError if it does not contain a header.
    """
    remedy = f"Pass what state_dict() returned. {OR_NOTHING}"
    if not isinstance(state, Mapping):
        raise InvalidArgumentError("state", state, remedy)
    parts = [parse(key, tensor) for key, tensor in state.items() if HEADER.fullmatch(str(key))]
    if not parts:
        keys = ", ".join(sorted(map(str, state))[:3])
        raise CheckpointError(keys, "it has no header").with_remedy(remedy)
    return parts


def take(state: Mapping[str, Tensor], needed: Mapping[str, Layout], parts: Sequence[RankHeader]) -> dict[str, Tensor]:
    """Check the tensors of ``state`` whose keys are in ``needed``, and return them on the CPU.

    ``needed`` maps keys to dtypes and shapes. ``parts`` are the headers. Raises CheckpointError if a tensor is missing,
    or if its dtype, shape or digest is wrong.
    """
    digests = {part.prefix + name: part.digests.get(name) for part in parts for name in part.all_layouts()}
    tensors = {}
    for key, (dtype, shape) in needed.items():
        tensor = state.get(key)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise CheckpointError(key, f"the tensor is {found}, its header says {dtype} of shape {shape}")
        tensors[key] = tensor.detach().cpu()
        if digest(tensors[key]) != digests[key]:
            reason = "its values are not the saved ones: a loader skipped it, it was changed, or its file is damaged"
            raise CheckpointError(key, reason)
    return tensors


def counter_layouts(parts: Sequence[RankHeader]) -> dict[str, Layout]:
    """Return the dtype and shape of each counter tensor in ``parts``, by key with prefix."""
    return {part.prefix + name: layout for part in parts for name, layout in part.layouts.items()}


def digest(tensor: Tensor) -> str:
    """Return the xxh3-128 hash of a tensor's elements in row-major order, as a hexadecimal string."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def _decoded(kind: type, value: Any) -> object:  # noqa: ANN401  any JSON value
    return DTYPES[value] if kind is torch.dtype else value


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """Return a header with its shards converted to dicts. Releases before 0.1.0 saved shards as lists of values."""
    shards = dict(found["shards"])
    for fqn, shard in shards.items():
        if isinstance(shard, list):
            num_rows, dim, dtype, *block = shard
            shards[fqn] = asdict(ShardSpec(TableSpec(fqn, num_rows, dim, dtype), *block))
    return {**found, "shards": shards}


def check_parts_alike(parts: Sequence[RankHeader]) -> None:
    """Raise StateMismatchError if ``parts`` differ in world size, mode, consumers, ``has_history`` or tables."""
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
    """Raise StateMismatchError if the saved tables differ from the expected tables in name, size or dtype.

    ``where`` is the start of the error message, for example ``"on rank 1 "``.
    """
    both = [{fqn: str(spec.table) for fqn, spec in shards.items()} for shards in (saved, expected)]
    differing = sorted(fqn for fqn in both[0].keys() | both[1].keys() if both[0].get(fqn) != both[1].get(fqn))
    if differing:
        listed = [", ".join(f"{fqn!r}: {tables.get(fqn, 'nothing')}" for fqn in differing) for tables in both]
        raise StateMismatchError(f"{where}tables", f"({listed[0]})", f"({listed[1]})")
