"""Find the mappings of raw ids in a predictor's model, and check that they can serve a version."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.raw_ids import RawIdMap
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.row_target import RowTarget
from delta_tracker.sharding.presence import has_collisions
from delta_tracker.stream.format.manifest import Manifest


def find_maps(model: object, names: Mapping[str, str]) -> dict[str, tuple[RawIdMap, ...]]:
    """Return a model's raw-id mappings by table FQN in the stream. ``names`` has the FQN in the model if it differs."""
    if not isinstance(model, nn.Module) or not has_collisions(model):
        return {}
    from delta_tracker.sharding.raw_id_maps import raw_id_maps  # noqa: PLC0415  it needs torchrec

    found = raw_id_maps(model)
    kept = {fqn: maps for fqn, maps in found.items() if fqn not in names and fqn not in names.values()}
    return kept | {name: found[own] for name, own in names.items() if own in found}


def check_hidden(manifest: Manifest, hidden: Collection[str], names: Mapping[str, str]) -> None:
    """Raise ModelMismatchError for a version with raw ids that would not change a mapping in a scripted module."""
    left = sorted(set(hidden) - {names.get(name, name) for name in manifest.dense})
    if left and manifest.identities:
        fqn = next(iter(manifest.identities))
        found = f"with the mapping {left[0]!r} in a module that was scripted or traced"
        remedy = "Pass the model as it was before it was scripted or traced"
        raise ModelMismatchError(fqn, f"{manifest.tables[fqn]} with raw ids", found).advising(remedy)


def check_indexes(indexes: Mapping[str, RawIdIndex], tables: Mapping[str, RowTarget]) -> dict[str, RawIdIndex]:
    """Return the indexes of a predictor by table FQN in the stream. Names in ``indexes`` may end with ``.weight``."""
    found = {str(name).removesuffix(".weight"): index for name, index in indexes.items()}
    for fqn in found:
        if fqn not in tables:
            raise InvalidArgumentError("raw_ids", fqn, f"Pass names of the model's tables: {sorted(tables)}")
    return found


def check_maps(manifest: Manifest, maps: Mapping[str, tuple[RawIdMap, ...]]) -> None:
    """Raise ModelMismatchError for a version whose raw ids cannot be mapped as the trainer maps them.

    A table with raw ids needs mappings that serve its buckets and no other table; one without needs to have none.
    """
    owners: dict[int, str] = {}  # address of a mapping to the first table
    for fqn, table in manifest.tables.items():
        identity = manifest.identities.get(fqn)
        found = maps.get(fqn, ())
        if identity is None:
            if found:
                remedy = "Leave the table out of raw_ids, or build the predictor's model without its collision module"
                raise ModelMismatchError(fqn, f"{table} without raw ids", "with a mapping of raw ids").advising(remedy)
            continue
        expected = f"{table} with raw ids"
        if not found:
            target = f"ModelTarget(model, raw_ids={{{fqn!r}: RawIdIndex({table.num_rows})}})"
            remedy = f"Pass {target}, or build the model as the trainer's"
            raise ModelMismatchError(fqn, expected, "without a mapping of raw ids").advising(remedy)
        for each in found:
            refusal = each.refusal(identity)
            if refusal:
                raise ModelMismatchError(fqn, expected, refusal)
            shared = owners.setdefault(each.memory.data_ptr(), fqn)
            if shared != fqn or sum(each.memory.data_ptr() == other.memory.data_ptr() for other in found) > 1:
                raise ModelMismatchError(fqn, expected, f"with a mapping of raw ids shared with {shared!r}")
