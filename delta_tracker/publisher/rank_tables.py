"""Schema of this rank's tables, and copies of their rows for a version. Rows are encoded when they are written."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import call
from typing import NamedTuple

import xxhash
from msgspec import to_builtins
from torch import Tensor

from delta_tracker.buffers.host_copy import HostCopy
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.publisher.host_copies import HostCopier, SelectedRows
from delta_tracker.stream.format.block_rows import BlockRows, held_rows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import FORMAT, STATES_FORMAT, Block, IdForm
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.types import Delta, Identity, ShardSpec, TableSpec, TableStates

EncodingChoice = Encoding | str | Mapping[str, Encoding | str] | None


def name_encodings(choice: EncodingChoice) -> str | dict[str, str] | None:
    """Return the names of the chosen encodings in a normal form, so that ranks can compare their choices."""
    if isinstance(choice, Mapping):
        return {fqn: Encoding.named(choice[fqn]).name for fqn in sorted(choice)}
    return None if choice is None else Encoding.named(choice).name


def choose_encodings(choice: EncodingChoice, live: LiveTables) -> dict[str, Encoding]:
    """Return the encoding of each table by FQN. Tables that ``choice`` omits are stored in their own dtype.

    Raises InvalidArgumentError if a table is unknown, an encoding is invalid, or an encoding does not support the
    number of columns of a shard.
    """
    own = {fqn: Encoding.of(table.dtype) for fqn, table in live.tables.items()}
    chosen = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(own, choice) if choice is not None else {}
    for fqn, name in chosen.items():
        if fqn not in own:
            raise InvalidArgumentError("encoding", fqn, f"Pass some of the tables {sorted(own)}")
        encoding = Encoding.named(name)
        for first, end in live.shards[fqn].columns:
            encoding.width(end - first)  # raises if the width is not supported
        own[fqn] = encoding
    return own


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Copies of the rows and dense tensors of a version, returned by :meth:`RankTables.copy_rows`.

    Args:
        copies: transfers to the host. Wait for all of them before reading ``rows`` or ``dense``.
    """

    rows: Sequence[BlockRows]
    dense: Mapping[str, Tensor]
    copies: Sequence[HostCopy]


class RankSchema(NamedTuple):
    """Schema of a version on this rank. If the schema changes, the next version must be a snapshot.

    All mappings are keyed by FQN. ``states`` describes the optimizer states of this rank's column ranges. It is empty
    if versions contain no states. ``text`` describes the tables and identities; ``digest`` is its int64 hash.
    """

    format: int
    states: Mapping[str, TableStates]
    identities: Mapping[str, Identity]
    tables: Mapping[str, TableSpec]
    text: str
    digest: int


class RankTables:
    """Tables of this rank. Provides the schema of the tables, and copies their rows to the host.

    Only the training thread may call the methods.

    Copies have the dtype of their table, and are encoded on the CPU when they are read. They use 8 bytes per row id, in
    addition to the size of the rows; see :class:`~.host_copies.HostCopier`. The result of :meth:`whole` is
    copied in chunks when it is read, and uses the memory of one chunk.

    With 2D parallelism, only the ranks of a table's first replica copy its rows.

    Args:
        encoding: choice of encodings that :func:`choose_encodings` accepts.
        writes_replicas: True if this rank writes replicated tables.
        with_states: True to also copy the optimizer states of the rows.

    Attributes:
        latest: schema of the tables at the last call of :meth:`current`.
        copying: schema of the snapshot that is being copied.
        published: schema of the last snapshot.
        unfused: FQNs of the tables without a fused optimizer.
    """

    def __init__(self, live: LiveTables, encoding: EncodingChoice, *, writes_replicas: bool, with_states: bool) -> None:
        self._live = live
        self._encoding = encoding
        self._writes_replicas = writes_replicas
        self._with_states = with_states
        self._copier = HostCopier()
        self._attach()
        self.copying = self.published = self.latest

    def current(self) -> RankSchema:
        """Return the current schema of the tables. If the tracker was reattached, look up the tables again first."""
        if self._attached != self._live.num_attached:
            self._attach()
        return self.latest

    def _attach(self) -> None:
        live, chosen = self._live, self._encoding
        tables, identities = dict(live.tables), dict(live.identities)
        states = dict(live.table_states) if self._with_states else {}
        if isinstance(chosen, Mapping):  # a table may have left the model since the encodings were checked
            chosen = {fqn: each for fqn, each in chosen.items() if fqn in tables}
        self._encodings = choose_encodings(chosen, live)
        self._shards = {  # those whose rows this rank writes
            fqn: shard
            for fqn, shard in live.shards.items()
            if shard.replica == 0 and (self._writes_replicas or not shard.is_replicated)
        }
        self.unfused = frozenset(tables) - live.fused_tables
        form = STATES_FORMAT if self._with_states or identities else FORMAT
        text = f"the tables {sorted(f'{table} {fqn}' for fqn, table in tables.items())}"
        if identities:
            text += f" with the raw ids {sorted(map(_shown, identities.items()))}"
        digest = xxhash.xxh64_intdigest(text.encode()) >> 1
        self.latest = RankSchema(form, states, identities, tables, text, digest)
        self._attached = live.num_attached  # last: an interrupted call is repeated

    def copy_rows(
        self,
        delta: Delta,
        *,
        whole: frozenset[str],
        dense: Mapping[str, Tensor],
        extra: Sequence[SelectedRows],
        owners: Mapping[str, Tensor],
    ) -> CopiedRows:
        """Start copying the current values of rows and dense tensors. Does not wait for the copies.

        Tables that this rank does not write are omitted. Call this method and :meth:`whole` within
        :func:`~delta_tracker.sharding.kernel_memory.one_cut`.

        Args:
            delta: the changed rows.
            whole: FQNs of the tables whose rows are all copied, including rows that are not in ``delta``.
            dense: dense tensors to copy, by name.
            extra: additional tensors to copy at the same time.
            owners: raw ids of the shard's rows (``[R]``) of each table with managed collisions, by FQN.

        Returns:
            The copies, with one block of rows for each column range of a shard.
        """
        selections: list[SelectedRows] = []
        views: list[Callable[[], BlockRows]] = []
        for fqn, shard in self._shards.items():
            ids = None if fqn in whole else delta[fqn].ids
            if shard.num_rows if ids is None else len(ids):
                self._add(selections, views, shard, ids, owners.get(fqn))
        held = {name: SelectedRows(tensor if tensor.dim() else tensor.view(1)) for name, tensor in dense.items()}
        copies = self._copier.copy([*selections, *held.values(), *extra])
        named = {name: selection.copied.view(dense[name].shape) for name, selection in held.items()}
        return CopiedRows(list(map(call, views)), named, copies)

    def whole(self, tables: frozenset[str], owners: Mapping[str, Tensor]) -> list[BlockRows]:
        """Return the rows of ``tables``, one block per column range. Omit tables that this rank does not write.

        Any thread may read the rows. Rows are copied in chunks when they are read. They include all updates that were
        queued on the device before this call, and possibly later ones. The states and the raw id of a row may be newer
        than its values. A row whose raw id changes in the meantime is contained in the next read of the tracker.

        Args:
            tables: FQNs of the tables.
            owners: raw ids of the shard's rows (``[R]``) of each table with managed collisions, by FQN.
        """
        blocks = []
        reader = cache(self._copier.reader)
        for fqn, shard in self._shards.items():
            if fqn not in tables or shard.num_rows == 0:
                continue
            for columns, view, states in self._columns(fqn, shard):
                block = self._block(fqn, shard, columns, shard.num_rows, "all")
                read = partial(_copied, reader(view.device), view, block)
                kept = tuple(partial(_copied_state, reader(state.device), state) for state in states)
                held = owners.get(fqn)
                owned_by = None if held is None else partial(_copied_state, reader(held.device), held.unsqueeze(1))
                blocks.append(BlockRows(block, None, read, kept, owned_by))
        return blocks

    def _add(
        self,
        selections: list[SelectedRows],
        views: list[Callable[[], BlockRows]],
        shard: ShardSpec,
        ids: Tensor | None,
        owners: Tensor | None,
    ) -> None:
        """Append selections of the rows ``ids`` of ``shard`` (None for all), and functions that return the copies."""
        fqn = shard.table.fqn
        form: IdForm = "all" if ids is None else self._encodings[fqn].listed_form
        num_rows = shard.num_rows if ids is None else len(ids)
        listed = owned = None
        if ids is not None:
            selections.append(listed := SelectedRows(ids, offset=shard.row_offset))
        if owners is not None:
            selections.append(owned := SelectedRows(owners.unsqueeze(1), ids))
        for columns, view, held in self._columns(fqn, shard):
            values = SelectedRows(view, ids)
            states = [SelectedRows(state, ids) for state in held] if held and ids is not None else []
            selections += [values, *states]
            block = self._block(fqn, shard, columns, num_rows, form)
            views.append(partial(_view, block, listed, values, states, owned))

    def _columns(self, fqn: str, shard: ShardSpec) -> Iterator[tuple[tuple[int, int], Tensor, Sequence[Tensor]]]:
        states: Sequence[Sequence[Tensor]] = [()] * len(shard.columns)
        if self._with_states:
            states = self._live.state_views(fqn)
        return zip(shard.columns, self._live.column_views(fqn), states, strict=True)

    def _block(self, fqn: str, shard: ShardSpec, columns: tuple[int, int], num_rows: int, ids: IdForm) -> Block:
        rows = (shard.row_offset, shard.row_offset + shard.num_rows)
        return Block(fqn, rows, columns, num_rows, ids, self._encodings[fqn])


def _shown(named: tuple[str, Identity]) -> str:
    """Return a short text for the FQN and the identity of a table. A hash represents the (up to 65,536) buckets."""
    fqn, identity = named
    digest = xxhash.xxh3_64_hexdigest(json.dumps(to_builtins(identity)).encode())
    return f"{fqn}: {len(identity.buckets)} buckets of {identity.hash_size} ids, {digest}"


def _view(
    block: Block, ids: SelectedRows | None, values: SelectedRows, states: list[SelectedRows], owned: SelectedRows | None
) -> BlockRows:
    return BlockRows(
        block,
        None if ids is None else ids.copied,
        partial(_encoded, values.copied, block),
        tuple([held_rows(state.copied) for state in states]) if states else (),
        None if owned is None else held_rows(owned.copied),
    )


def _encoded(held: Tensor, block: Block, begin: int, end: int) -> Tensor:
    rows = held[begin:end]
    return rows if rows.dtype == block.encoding.dtype else encode_rows(rows, block.encoding)


def _copied_state(read: Callable[[Tensor], Tensor], view: Tensor, begin: int, end: int) -> Tensor:
    return read(view[begin:end])


def _copied(read: Callable[[Tensor], Tensor], view: Tensor, block: Block, begin: int, end: int) -> Tensor:
    """Copy the rows ``[begin, end)`` of ``view``, and return them in the encoding of ``block``."""
    # A copy even without encoding: training may write to the rows between the hash and the write.
    return _encoded(read(view[begin:end]), block, 0, end - begin)
