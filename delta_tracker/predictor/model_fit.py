"""Comparison of a version with a model that differs from the trainer's model: :func:`fit`.

If the tables of a stream change, the next version is a snapshot. A table that fits again is therefore written whole,
unless the model's table was replaced; see :meth:`~delta_tracker.predictor.model_writer.ModelWriter.keeps_rows`.
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
    """Return a spec with the model's size and dtype for each of ``tables`` that is in ``targets``, by name."""
    return {
        fqn: TableSpec(fqn, target.num_rows, target.dim, target.dtype or table.dtype)
        for fqn, table in tables.items()
        if (target := targets.get(fqn)) is not None
    }


def stated(specs: Mapping[str, TableSpec | DenseSpec], with_raw_ids: Collection[str]) -> dict[str, str]:
    """Return the texts of the sizes of tables and dense tensors, which say ``with raw ids`` for those tables."""
    return {name: f"{spec}{' with raw ids' if name in with_raw_ids else ''}" for name, spec in specs.items()}


@dataclass(frozen=True, slots=True)
class Fit:
    """Part of a version that is applied to a model. Result of :func:`fit`.

    Args:
        tables: tables that are applied, by name in the stream, with their number of rows in the model.
        dense: names of the dense tensors that are applied.
        differences: message for each table and dense tensor that is not applied or only applied in part, by name.
    """

    tables: Mapping[str, TableSpec]
    dense: Collection[str]
    differences: Mapping[str, str]

    def narrowed(self, entry: Manifest) -> Manifest:
        """Return a copy of ``entry`` with only the part that is applied; ``entry`` itself without differences."""
        if entry.kind == "claim" or not self.differences:
            return entry
        narrowed = entry.having({*self.tables, *self.dense}.__contains__)
        return replace(narrowed, tables={fqn: self.tables[fqn] for fqn in narrowed.tables})


def fit(
    entry: Manifest, tables: Mapping[str, TableSpec], dense: Mapping[str, DenseSpec] | None, mapped: Collection[str]
) -> Fit:
    """Return the part of a version that fits a model.

    ``tables`` has the size and dtype of the model's tables by name in the stream. ``dense`` has the dtype and shape of
    its dense tensors; None if they are not applied. ``mapped`` has the names of its tables with a mapping of raw ids.

    If a table has a different number of rows, the rows that both have fit. A table with a different width or dtype does
    not fit, nor does a table with raw ids that differs in any way.
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
