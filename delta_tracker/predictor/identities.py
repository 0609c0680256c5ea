"""Change the owners of rows, so that no raw id reaches the row of another one while a version is applied.

The owner of a row is the raw id that a managed-collision module maps to it. The order of each version is:

1. Find the rows whose owner changes: the owners of the whole version are compared with those of the live mapping, from
   which an interrupted attempt may have removed some. Nothing is changed.
2. Unmap the owners of these rows, which then read the default rows of their buckets.
3. Write the rows in chunks.
4. Replace the mapping.

At the end of each step, each raw id reads its own row as of the version before or this one, or its default row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_tracker.errors import MalformedError, ModelMismatchError
from delta_tracker.raw_ids import NO_OWNER, RawIdMap, check_owners
from delta_tracker.stream.format.manifest import Manifest, entry_name
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.types import Identity

VersionOwners = Mapping[str, tuple[Tensor, Tensor]]
"""Mapping of table FQN to the ``[N]`` global row ids of a version, and the ``[N]`` owners of these rows."""


def version_owners(contents: Contents) -> VersionOwners:
    """Return the owners of a version's rows, for each table with managed collisions, once they are validated."""
    manifest = contents.manifest
    pieces: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for fqn, ids, owners in contents.owners():
        pieces[fqn].append((torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids, owners))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for fqn, identity in manifest.identities.items():
        of_table = pieces[fqn] or [(torch.empty(0, dtype=torch.int64),) * 2]
        slots, owners = (torch.cat(each) for each in zip(*of_table, strict=True))
        try:
            check_owners(identity, slots, owners)
        except ValueError as error:
            raise MalformedError(entry_name(manifest.version), f"in table {fqn!r}, {error}") from error
        found[fqn] = slots, owners
    return found


def identities_after(manifest: Manifest, held: Mapping[str, Identity]) -> Mapping[str, Identity]:
    """Return the buckets of all tables after a version, by table FQN. ``held`` has those before the version."""
    if manifest.kind == "snapshot":
        return manifest.identities
    for fqn, identity in manifest.identities.items():
        if held.get(fqn) != identity:
            raise MalformedError(
                entry_name(manifest.version),
                f"its buckets of raw ids of table {fqn!r} are not those of its predecessor, but it is no snapshot",
            )
    return {**held, **manifest.identities}


@dataclass(frozen=True, slots=True, eq=False)
class OwnerChange:
    """Change of the owners in one mapping. All tensors are int64."""

    fqn: str  # name of the table in the stream
    raw_ids: RawIdMap  # the live mapping
    identity: Identity  # buckets of the table in the version
    slots: Tensor  # ``[M]`` global ids of the rows whose owner changes
    former: Tensor  # ``[M]`` owners of these rows in the live mapping
    final: Tensor  # ``[R]`` owners of the mapping's rows after the version

    @property
    def default_rows(self) -> list[int]:
        """Default rows to write before :meth:`adopt`, so that they do not contain rows of former owners."""
        if self.raw_ids.routes_by(self.identity):
            return []
        return [bucket.default for bucket in self.identity.buckets if bucket.default is not None]

    def num_admitted(self) -> int:
        """Return the number of rows that get a raw id."""
        return int((self.final[self.slots - self.raw_ids.rows[0]] != NO_OWNER).sum())

    def unmap(self) -> int:
        """Unmap the raw ids of the rows whose owner changes, and return their number. The caller must hold the lock."""
        is_owned = self.former != NO_OWNER
        if bool(is_owned.any()):
            self.raw_ids.unmap(self.slots[is_owned], self.former[is_owned])
        return int(is_owned.sum())

    def adopt(self) -> None:
        """Route unknown raw ids by the buckets of the version. The caller must hold the lock for writing."""
        if not self.raw_ids.routes_by(self.identity):
            self.raw_ids.adopt(self.identity)


def owner_changes(
    version: VersionOwners, identities: Mapping[str, Identity], maps: Mapping[str, tuple[RawIdMap, ...]]
) -> list[OwnerChange]:
    """Return the changes of a version for all live mappings, by the buckets of the version. Nothing is changed."""
    return [
        _change(fqn, raw_ids, identity, *version[fqn]) for fqn, identity in identities.items() for raw_ids in maps[fqn]
    ]


def _change(fqn: str, raw_ids: RawIdMap, identity: Identity, slots: Tensor, owners: Tensor) -> OwnerChange:
    first, end = raw_ids.rows
    if identity.num_rows != end - first:
        is_here = (slots >= first) & (slots < end)
        slots, owners = slots[is_here], owners[is_here]
    live = raw_ids.owners()
    if not len(slots) or torch.equal(live[slots - first], owners):
        none = torch.empty(0, dtype=torch.int64)
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
