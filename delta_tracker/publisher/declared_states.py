"""States of whole tables, from those that each rank declares of its column ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from delta_tracker.errors import RankFailedError
from delta_tracker.stream.format.manifest import states_record
from delta_tracker.stream.format.parse import parse_states
from delta_tracker.types import TableSpec, TableStates


def states_message(own: Mapping[str, TableStates]) -> dict[str, Any]:
    """Return the states of a rank's tables, by FQN, as JSON values for the other ranks."""
    records = {fqn: states_record(states) for fqn, states in own.items()}
    return {fqn: {**record, "states": list(record["states"])} for fqn, record in records.items()}


def declared_states(
    messages: Sequence[Mapping[str, Mapping[str, Any]]], tables: Mapping[str, TableSpec]
) -> dict[str, TableStates]:
    """Return the states of whole tables, by FQN, from the :func:`states_message` of all ranks in rank order.

    Tables that no rank declares are missing. Raises RankFailedError if ranks declare different optimizers or states of
    a table, or their ranges do not divide its columns.
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
