"""Combine the states that each rank declares for its column ranges into the states of whole tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import convert

from delta_tracker.errors import RankFailedError
from delta_tracker.stream.format.parse import check_columns
from delta_tracker.types import TableSpec, TableStates


def declared_states(messages: Sequence[Mapping[str, Any]], tables: Mapping[str, TableSpec]) -> dict[str, TableStates]:
    """Combine the states that each rank declares into the states of whole tables, and return them by FQN.

    ``messages`` contains one mapping per rank, in rank order, of FQN to the states of the rank's column ranges, as JSON
    values. Omits tables for which no rank declares states. Raises RankFailedError if ranks declare different optimizers
    or states for a table, or if their column ranges do not cover each of its columns once.
    """
    first: dict[str, TableStates] = {}
    columns: dict[str, set[tuple[int, int]]] = {}
    for rank, message in enumerate(messages):
        for fqn, states in convert(message, dict[str, TableStates]).items():
            known = first.setdefault(fqn, states)
            if replace(known, columns=states.columns) != states:
                raise RankFailedError(rank, f"{_shown(fqn, states)} where another rank has {_shown(fqn, known)}")
            columns.setdefault(fqn, set()).update(states.columns)
    found = {}
    for fqn in [each for each in tables if each in first]:
        found[fqn] = replace(first[fqn], columns=tuple(sorted(columns[fqn])))
        try:
            check_columns(tables[fqn], found[fqn].columns)
        except ValueError as error:
            raise RankFailedError(0, f"shards of different sizes: {error}") from error
    return found


def _shown(fqn: str, table: TableStates) -> str:
    states = ", ".join(f"{each.name} {each.dtype_name} per {each.width}" for each in table.states)
    return f"the optimizer {table.optimizer} with {states or 'no states'} for {fqn!r}"
