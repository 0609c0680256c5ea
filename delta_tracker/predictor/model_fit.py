"""Comparison of the tables of a version with those of a model: :func:`fit`, for models that differ from the trainer's.

A version with other tables than the version before is a snapshot. A table that fits again was therefore written whole,
unless the model's own table was replaced, see :meth:`~delta_tracker.predictor.model_writer.ModelWriter.keeps_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.types import TableSpec

OnModelChange = Literal["stop", "continue"]
MISSING = "missing"


def specs_of(tables: Mapping[str, TableSpec], targets: Mapping[str, RowTarget]) -> dict[str, TableSpec]:
    """Return the size and dtype in the model of those ``tables`` that it has, by name in the stream."""
    return {
        fqn: TableSpec(fqn, target.num_rows, target.dim, target.dtype or table.dtype)
        for fqn, table in tables.items()
        if (target := targets.get(fqn)) is not None
    }


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model takes of a version.

    Args:
        tables: tables that are applied, by name, with the number of rows in the model.
        dense: names of the dense tensors that are applied.
        differences: sentence by name of each table and dense tensor that is not applied, or only in part.
    """

    tables: Mapping[str, TableSpec]
    dense: Collection[str]
    differences: Mapping[str, str]

    def narrowed(self, entry: Manifest) -> Manifest:
        """Return an entry with what is applied of it: the same object if that is all."""
        if entry.kind == "claim" or not self.differences:
            return entry
        narrowed = entry.having({*self.tables, *self.dense}.__contains__)
        return replace(narrowed, tables={fqn: self.tables[fqn] for fqn in narrowed.tables})


def fit(
    entry: Manifest, tables: Mapping[str, TableSpec], dense: Mapping[str, DenseSpec] | None, mapped: Collection[str]
) -> Fit:
    """Return what a model takes of a version ``entry``.

    ``tables`` has the size and dtype of the model's tables by name in the stream, ``dense`` the dtype and shape of its
    dense tensors or None if they are not applied, and ``mapped`` the names of its tables with a mapping of raw ids.

    A table with another number of rows is applied in part: the rows that both have. One of another width or dtype is
    left out. So is one with raw ids that differs at all, because unknown raw ids are routed by the number of rows.
    """
    taken: dict[str, TableSpec] = {}
    differences: dict[str, str] = {}
    for fqn, table in entry.tables.items():
        own, has_raw_ids, has_mapping = tables.get(fqn), fqn in entry.identities, fqn in mapped
        if own == table and has_raw_ids == has_mapping:
            taken[fqn] = table
            continue
        words = [" with raw ids" if each else "" for each in (has_raw_ids, has_mapping)]
        found, effect = MISSING if own is None else f"{own}{words[1]}", "it is left out"
        if own is not None and replace(own, num_rows=table.num_rows) == table and not any(words):
            taken[fqn] = own
            effect = f"rows from {min(own.num_rows, table.num_rows)} on "
            effect += "are left out" if own.num_rows < table.num_rows else "keep their values"
        differences[fqn] = f"table {fqn!r} is {table}{words[0]} in the stream but {found} in the model: {effect}"
    for name, spec in entry.dense.items():
        if dense is not None and (held := dense.get(name)) != spec:
            text = f"dense tensor {name!r} is {spec} in the stream but {held or MISSING} in the model: it is left out"
            differences[name] = text
    return Fit(taken, entry.dense.keys() - differences.keys(), differences)
