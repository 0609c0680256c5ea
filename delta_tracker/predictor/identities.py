"""Change the owners of rows such that no lookup of a raw id ever reads the row of another raw id.

The owner of a row is the raw id that a managed-collision module maps to it. The steps for each version are:

1. Compare the owners in the version with the owners in the live mapping, to find the rows whose owner changes. An
   interrupted attempt may have removed some owners from the live mapping.
2. Unmap the owners of these rows. Lookups of these owners then read the default rows of their buckets.
3. Write the rows in chunks.
4. Replace the mapping.

After each step, a lookup of a raw id reads its row from the previous or the new version, or the default row.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError, MalformedError, ModelMismatchError
from delta_tracker.predictor.placement import Chunk, placements
from delta_tracker.raw_ids import NO_OWNER, RawIdMap, check_owners
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.row_target import RowTarget
from delta_tracker.sharding.presence import has_collisions
from delta_tracker.stream.format.manifest import Manifest, entry_name
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.types import Identity

_logger = logging.getLogger(__name__)
VersionOwners = Mapping[str, tuple[Tensor, Tensor]]
"""Mapping of table FQN to the ``[N]`` global row ids of a version, and the ``[N]`` owners of these rows."""


def version_owners(contents: Contents) -> VersionOwners:
    """Return the owner (raw id) of each row of a version, by table FQN. Raise MalformedError if an owner is invalid."""
    manifest = contents.manifest
    pieces: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for fqn, ids, owners in contents.owners():
        pieces[fqn].append((torch.arange(ids.start, ids.stop, device="cpu") if isinstance(ids, slice) else ids, owners))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for fqn, identity in manifest.identities.items():
        of_table = pieces[fqn] or [(torch.empty(0, dtype=torch.int64, device="cpu"),) * 2]
        slots, owners = (torch.cat(each) for each in zip(*of_table, strict=True))
        try:
            check_owners(identity, slots, owners)
        except ValueError as error:
            raise MalformedError(entry_name(manifest.version), f"in table {fqn!r}, {error}") from error
        found[fqn] = slots, owners
    return found


def identities_after(manifest: Manifest, held: Mapping[str, Identity]) -> Mapping[str, Identity]:
    """Return the buckets of each table's raw ids after a version is applied. ``held`` contains the current buckets."""
    if manifest.kind == "snapshot":  # a table that it lacks keeps its rows and its mapping
        kept = {fqn: identity for fqn, identity in held.items() if fqn not in manifest.tables}
        return {**kept, **manifest.identities}
    for fqn, identity in manifest.identities.items():
        if held.get(fqn) != identity:
            reason = f"its buckets of raw ids of table {fqn!r} are not those of its predecessor, but it is no snapshot"
            raise MalformedError(entry_name(manifest.version), reason)
    return {**held, **manifest.identities}


@dataclass(frozen=True, slots=True, eq=False)
class OwnerChange:
    """Change that a version makes to the owners (raw ids of rows) in one live mapping. All tensors are int64."""

    fqn: str  # name of the table in the stream
    raw_ids: RawIdMap  # the live mapping
    identity: Identity  # buckets of the table in the version
    slots: Tensor  # ``[M]`` global ids of the rows whose owner changes
    former: Tensor  # ``[M]`` owners of these rows in the live mapping
    final: Tensor  # ``[R]`` owners of the mapping's rows after the version

    @property
    def default_rows(self) -> tuple[int, ...]:
        """Global ids of the default rows to write before the buckets change; empty if the buckets do not change."""
        return () if self.raw_ids.routes_by(self.identity) else self.identity.defaults

    def num_admitted(self) -> int:
        """Return the number of changed rows that have an owner after the change."""
        return int((self.final[self.slots - self.raw_ids.rows[0]] != NO_OWNER).sum())

    def unmap(self) -> int:
        """Unmap the owners of the changed rows and return their number. The caller must hold the lock for writing."""
        is_owned = self.former != NO_OWNER
        if bool(is_owned.any()):
            self.raw_ids.unmap(self.slots[is_owned], self.former[is_owned])
        return int(is_owned.sum())


def owner_changes(
    version: VersionOwners, identities: Mapping[str, Identity], maps: Mapping[str, tuple[RawIdMap, ...]]
) -> list[OwnerChange]:
    """Compare the owners in ``version`` with the live mappings ``maps``. Return the changes, without applying them."""
    return [_change(fqn, each, identity, *version[fqn]) for fqn, identity in identities.items() for each in maps[fqn]]


def _change(fqn: str, raw_ids: RawIdMap, identity: Identity, slots: Tensor, owners: Tensor) -> OwnerChange:
    first, end = raw_ids.rows
    if identity.num_rows != end - first:
        is_here = (slots >= first) & (slots < end)
        slots, owners = slots[is_here], owners[is_here]
    live = raw_ids.owners()
    if not len(slots) or torch.equal(live[slots - first], owners):
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return OwnerChange(fqn, raw_ids, identity, none, none, live)
    final = live.clone()
    final[slots - first] = owners
    # An interrupted newer version, which is applied again later, may have mapped these ids to rows that this version
    # does not have.
    admitted = final[(final != live) & (final != NO_OWNER)]
    former = raw_ids.slots_of(admitted)
    is_here = (former >= first) & (former < end)
    former, admitted = former[is_here] - first, admitted[is_here]
    left = former[(live[former] == admitted) & (final[former] == admitted)]
    final[left] = NO_OWNER
    changed = (final != live).nonzero().flatten()
    admitted = changed[final[changed] != NO_OWNER]
    conflict = raw_ids.conflict(admitted + first, final[admitted]) if len(admitted) else ""
    if conflict:
        raise ModelMismatchError(fqn, "a table with raw ids", conflict)
    return OwnerChange(fqn, raw_ids, identity, changed + first, live[changed], final)


def default_chunks(contents: Contents, changes: Iterable[OwnerChange], targets: Mapping[str, RowTarget]) -> list[Chunk]:
    """Return chunks that write the :attr:`OwnerChange.default_rows` of ``changes``, with values from ``contents``."""
    chunks: list[Chunk] = []
    for change in changes:
        for slot in change.default_rows:
            rows = [
                each.within((slot, slot + 1), each.block.columns)
                for each in (*contents.whole, *contents.listed)
                if each.block.table == change.fqn and each.block.rows[0] <= slot < each.block.rows[1]
            ]
            for placement in placements(rows, targets):
                chunks += placement.chunks(1)
    return chunks


def set_saved_identities(identities: Mapping[str, Identity], maps: Mapping[str, tuple[RawIdMap, ...]]) -> None:
    """Use the saved buckets ``identities`` for unknown raw ids. The caller must hold the lock for writing."""
    found = [(fqn, raw_ids, identity) for fqn, identity in identities.items() for raw_ids in maps.get(fqn, ())]
    for fqn, raw_ids, identity in found:
        refusal = raw_ids.refusal(identity)
        if refusal:
            raise InvalidArgumentError("state", fqn, f"Load it with the model that it was saved with: {refusal}")
        if isinstance(raw_ids, RawIdIndex) and raw_ids.identity != identity:
            text = "Load the state of its RawIdIndex first that was saved with the position"
            raise InvalidArgumentError("state", fqn, text)
        first, end = raw_ids.rows
        owners = raw_ids.owners()
        try:
            check_owners(identity, torch.arange(first, end, device="cpu"), owners)
        except ValueError as error:
            text = f"Load the mapping of raw ids that was saved with the position: {error}"
            raise InvalidArgumentError("state", fqn, text) from error
        if bool((owners == NO_OWNER).all()):
            _logger.warning("no row of %s has a raw id: load the mapping before the position", fqn)
    for _, raw_ids, identity in found:
        raw_ids.set_identity(identity)


def find_maps(model: object, names: Mapping[str, str]) -> dict[str, tuple[RawIdMap, ...]]:
    """Return the raw id mappings of a model, by FQN in the stream. ``names`` maps these FQNs to FQNs in the model."""
    if not isinstance(model, nn.Module) or not has_collisions(model):
        return {}
    from delta_tracker.sharding.raw_id_maps import raw_id_maps  # noqa: PLC0415  it needs torchrec

    found = raw_id_maps(model)
    kept = {fqn: maps for fqn, maps in found.items() if fqn not in names and fqn not in names.values()}
    return kept | {name: found[own] for name, own in names.items() if own in found}


def check_hidden(manifest: Manifest, hidden: Collection[str], names: Mapping[str, str]) -> None:
    """Raise ModelMismatchError if a version has raw ids and a scripted or traced module of the model maps raw ids.

    ``hidden`` is the result of :func:`traced_collisions`. Mappings that are dense tensors of the version are allowed.
    """
    left = sorted(set(hidden) - {names.get(name, name) for name in manifest.dense})
    if left and manifest.identities:
        fqn = next(iter(manifest.identities))
        found = f"with the mapping {left[0]!r} in a module that was scripted or traced"
        remedy = "Pass the model as it was before it was scripted or traced"
        raise ModelMismatchError(fqn, f"{manifest.tables[fqn]} with raw ids", found).with_remedy(remedy)


def check_indexes(indexes: Mapping[str, RawIdIndex], tables: Mapping[str, RowTarget]) -> dict[str, RawIdIndex]:
    """Return ``indexes`` by FQN without ``.weight``. Raise InvalidArgumentError if a table is unknown."""
    found = {str(name).removesuffix(".weight"): index for name, index in indexes.items()}
    for fqn in found:
        if fqn not in tables:
            raise InvalidArgumentError("raw_ids", fqn, f"Pass names of the model's tables: {sorted(tables)}")
    return found


def check_maps(manifest: Manifest, maps: Mapping[str, tuple[RawIdMap, ...]]) -> None:
    """Raise ModelMismatchError if the live mappings ``maps`` do not fit the tables of a version.

    A table with raw ids needs one or more mappings. These must support the buckets of the table, and must not be shared
    with another table. A table without raw ids must have no mapping.
    """
    owners: dict[int, str] = {}  # address of a mapping to the first table
    for fqn, table in manifest.tables.items():
        identity = manifest.identities.get(fqn)
        found = maps.get(fqn, ())
        if identity is None:
            if found:
                remedy = "Leave the table out of raw_ids, or build the predictor's model without its collision module"
                expected = f"{table} without raw ids"
                raise ModelMismatchError(fqn, expected, "with a mapping of raw ids").with_remedy(remedy)
            continue
        expected = f"{table} with raw ids"
        if not found:
            target = f"ModelTarget(model, raw_ids={{{fqn!r}: RawIdIndex({table.num_rows})}})"
            remedy = f"Pass {target}, or build the model as the trainer's"
            raise ModelMismatchError(fqn, expected, "without a mapping of raw ids").with_remedy(remedy)
        for each in found:
            refusal = each.refusal(identity)
            if refusal:
                raise ModelMismatchError(fqn, expected, refusal)
            shared = owners.setdefault(each.memory.data_ptr(), fqn)
            if shared != fqn or sum(each.memory.data_ptr() == other.memory.data_ptr() for other in found) > 1:
                raise ModelMismatchError(fqn, expected, f"with a mapping of raw ids shared with {shared!r}")
