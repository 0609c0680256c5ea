"""Compare the tables of a version with the tables of a model, which may differ from the trainer's: :func:`fit`.

If the tables of a trainer change, the next version is a snapshot, which writes all rows of each table that fits. See
:meth:`~delta_tracker.predictor.model_writer.ModelWriter.keeps_rows` for changes of the model's tables.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from delta_tracker.row_target import RowTarget
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.types import TableSpec

OnModelChange = Literal["stop", "continue"]
MISSING = "missing"


def served_specs(tables: Mapping[str, TableSpec], targets: Mapping[str, RowTarget]) -> dict[str, TableSpec]:
    """Return the spec in the model of each table that is in ``tables`` and in ``targets``, by name in the stream."""
    return {
        fqn: TableSpec(fqn, target.num_rows, target.dim, target.dtype or table.dtype)
        for fqn, table in tables.items()
        if (target := targets.get(fqn)) is not None
    }


def spec_texts(specs: Mapping[str, TableSpec | DenseSpec], with_raw_ids: Collection[str]) -> dict[str, str]:
    """Return each spec as text, by name, with the suffix ``with raw ids`` for the tables in ``with_raw_ids``."""
    return {name: f"{spec}{' with raw ids' if name in with_raw_ids else ''}" for name, spec in specs.items()}


def difference(kind: str, name: str, in_stream: object, in_model: object) -> str:
    """Return a sentence about a table or dense tensor that differs; ``kind`` is "table" or "dense tensor"."""
    return f"{kind} {name!r} is {in_stream} in the stream but {in_model} in the model"


@dataclass(frozen=True, slots=True)
class Fit:
    """Part of a version that fits a model and is applied.

    Args:
        tables: spec of each applied table, by name. The number of rows is that of the table in the model.
        dense: names of the applied dense tensors.
        differences: sentence about each table or dense tensor that is left out or partly applied, by name.
    """

    tables: Mapping[str, TableSpec]
    dense: Collection[str]
    differences: Mapping[str, str]

    def narrowed(self, entry: Manifest) -> Manifest:
        """Return ``entry`` with only the applied tables and dense tensors; ``entry`` itself if all of it is applied."""
        if entry.kind == "claim" or not self.differences:
            return entry
        narrowed = entry.narrowed({*self.tables, *self.dense}.__contains__)
        return replace(narrowed, tables={fqn: self.tables[fqn] for fqn in narrowed.tables})


def fit(
    entry: Manifest, tables: Mapping[str, TableSpec], dense: Mapping[str, DenseSpec] | None, mapped: Collection[str]
) -> Fit:
    """Return the part of the version ``entry`` that fits a model.

    ``tables`` and ``dense`` are the specs of the model's tables and dense tensors, by name in the stream. ``dense`` is
    None to leave out all dense tensors. ``mapped`` contains the names of the model's tables that have a raw id mapping.

    If only the number of rows of a table differs, the rows that exist in both are applied. A table with a different
    dtype or number of columns is left out. A table with raw ids is also left out if only the number of rows differs,
    because the rows of unknown raw ids depend on this number.
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
        differences[fqn] = f"{difference('table', fqn, f'{table}{words[0]}', found)}: {effect}"
    for name, spec in entry.dense.items():
        if dense is not None and (held := dense.get(name)) != spec:
            differences[name] = f"{difference('dense tensor', name, spec, held or MISSING)}: it is left out"
    return Fit(taken, entry.dense.keys() - differences.keys(), differences)
