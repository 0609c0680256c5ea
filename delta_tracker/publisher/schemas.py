"""Schema of a publisher's versions, which only a snapshot may change: :class:`Schemas`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from delta_tracker.errors import RankFailedError
from delta_tracker.publisher.row_gatherer import EncodingChoice, Gatherer, choose_encodings
from delta_tracker.stream.format.manifest import FORMAT, STATES_FORMAT, states_record
from delta_tracker.stream.format.parse import parse_states
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.types import Identity, TableSpec, TableStates


class RankSchema(NamedTuple):
    """Schema of this rank's versions, by FQN. A version with another schema than the version before must be a snapshot.

    The states are those of this rank's column ranges, and are empty if the versions have no states.
    """

    format: int
    states: Mapping[str, TableStates]
    identities: Mapping[str, Identity]
    tables: Mapping[str, TableSpec]


class Schemas:
    """Schema of this rank's tables, and those of a publisher's snapshots.

    Attaches ``gatherer`` to the shards. ``encoding`` is a choice that :func:`choose_encodings` has accepted.

    Attributes:
        latest: schema of the tables at the last call of :meth:`current`.
        copying: schema of the snapshot that is being copied.
        published: schema of the last snapshot.
        unfused: FQNs of the tables without a fused optimizer.
    """

    def __init__(self, live: LiveTables, gatherer: Gatherer, encoding: EncodingChoice, *, has_states: bool) -> None:
        self._live = live
        self._gatherer = gatherer
        self._encoding = encoding
        self._has_states = has_states
        self._attach()
        self.copying = self.published = self.latest

    def current(self) -> RankSchema:
        """Return the schema of the tables."""
        if self._attached != self._live.num_attached:
            self._attach()
        return self.latest

    def collisions(self) -> Mapping[str, nn.Module]:
        """Return this rank's managed-collision modules, by table FQN."""
        self.current()
        return self._collisions

    def _attach(self) -> None:
        """Find what depends on the shards."""
        live = self._live
        tables, identities, chosen = dict(live.tables), dict(live.identities), self._encoding
        states = dict(live.table_states) if self._has_states else {}
        if isinstance(chosen, Mapping):  # a table may have left the model since the encodings were checked
            chosen = {fqn: each for fqn, each in chosen.items() if fqn in tables}
        self._gatherer.attach(choose_encodings(chosen, live))
        self._collisions = live.collision_modules if self._has_states else {}
        self.unfused = frozenset(tables) - live.fused_tables
        form = STATES_FORMAT if self._has_states or identities else FORMAT
        self.latest = RankSchema(form, states, identities, tables)
        self._attached = live.num_attached  # last: an interrupted call is repeated


def states_message(own: Mapping[str, TableStates]) -> dict[str, Any]:
    """Return the states of a rank's tables, by FQN, as JSON values for the other ranks."""
    records = {fqn: states_record(states) for fqn, states in own.items()}
    return {fqn: {**record, "states": list(record["states"])} for fqn, record in records.items()}


def declared_states(
    messages: Sequence[Mapping[str, Mapping[str, Any]]], tables: Mapping[str, TableSpec]
) -> dict[str, TableStates]:
    """Return the states of whole tables. Their column ranges are those of all ranks.

    Args:
        messages: results of :func:`states_message` of all ranks, in rank order.
        tables: FQN to table, the same on every rank.

    Returns:
        FQN to states; tables that no rank declares are missing.

    Raises:
        RankFailedError: if ranks declare different optimizers or states of a table, or their ranges do not divide
            the table's columns.
    """
    first: dict[str, Mapping[str, Any]] = {}
    columns: dict[str, set[tuple[int, int]]] = {}
    for rank, message in enumerate(messages):
        for fqn, record in message.items():
            known = first.setdefault(fqn, record)
            if (record["optimizer"], record["states"]) != (known["optimizer"], known["states"]):
                raise RankFailedError(rank, f"{_shown(fqn, record)} where another rank has {_shown(fqn, known)}")
            columns.setdefault(fqn, set()).update((begin, end) for begin, end in record["columns"])
    found = {}
    for fqn, table in tables.items():
        if fqn in first:
            try:
                found[fqn] = parse_states(table, {**first[fqn], "columns": sorted(columns[fqn])})
            except ValueError as error:
                raise RankFailedError(0, f"shards of different sizes: {error}") from error
    return found


def _shown(fqn: str, record: Mapping[str, Any]) -> str:
    states = ", ".join(f"{each['name']} {each['dtype']} per {each['width']}" for each in record["states"])
    return f"the optimizer {record['optimizer']} with {states or 'no states'} for {fqn!r}"
