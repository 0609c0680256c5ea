"""Writes of a restore on one rank: :class:`Plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError, NotRecoverableError
from delta_tracker.recovery.row_writer import RowWriter
from delta_tracker.row_target import RowTarget
from delta_tracker.rows import copy_from_host
from delta_tracker.sharding.collision_states import load_collision_states
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.optimizer_rows import Scalars, write_scalars
from delta_tracker.stream.format.manifest import Manifest, Part, Stored
from delta_tracker.stream.format.part_reader import PartReader, Ranged
from delta_tracker.stream.format.shard_rows import wanted
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Everything that a restore writes to the model on this rank.

    Args:
        path: entries to apply, in order. The last one has the training states.
        applied: entry up to which all rows are written already. No effect if the path begins with another version.
        shards: FQN to shard, for each table that is restored.
        targets: name of a table or state table to its memory.
        scalars: FQN to the numbers of the table's kernel.
        collisions: FQN to the managed-collision module, and its states on the ranks that published the version.
        held: dense tensors of the model, by name.
        names: names of the dense tensors that are in the parts of the last entry.
        dense: other dense tensors by name, in the order of writing: those of rank 0, then the buffers of this rank.
    """

    storage: Storage
    path: Sequence[Manifest]
    applied: Manifest | None
    shards: Mapping[str, LocalShard]
    targets: Mapping[str, RowTarget]
    scalars: Mapping[str, Scalars]
    collisions: Mapping[str, tuple[object, Sequence[Mapping[str, Any]]]]
    held: Mapping[str, Tensor]
    names: Collection[str]
    dense: Mapping[str, Tensor]

    @property
    def last(self) -> Manifest:
        """Entry with the training states."""
        return self.path[-1]

    @property
    def continues(self) -> bool:
        """True if the rows of the first entry of the path are written already."""
        return self.applied is not None and self.path[0].link == self.applied.link

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """Description of each shard, by FQN."""
        return {fqn: shard.spec for fqn, shard in self.shards.items()}

    def check_objects(self, others: Iterable[Stored]) -> None:
        """Check that the objects that :meth:`write` reads, and ``others``, exist and have their sizes."""
        objects = [*self._objects(), *others]
        sizes: dict[str, int] = {}
        # In a local directory, a listing would also read the status of the files of all later versions.
        if objects and self.storage.is_remote:
            first = min(each.name for each in objects)[:-1]  # sorts before all of them
            sizes = {each.name: each.num_bytes for each in self.storage.objects("parts", after=first)}
        for each in objects:
            size = sizes[each.name] if each.name in sizes else self.storage.size(each.name)
            if size is None:
                raise NotRecoverableError(self.storage.url, self.last.version, f"{each.name} is missing")
            if size != each.num_bytes:
                raise CorruptPartError(each.name, f"it has {size} bytes instead of {each.num_bytes}")

    @torch.no_grad()
    def write(self) -> None:
        """Write all of the plan."""
        writer = RowWriter(storage=self.storage, shards=self.specs, targets=self.targets)
        for entry in self.path[self.continues :]:
            writer.write(entry)
        write_scalars(self.shards, self.scalars)
        for module, states in self.collisions.values():
            load_collision_states(module, states)
        for part in self.last.parts:
            if not set(part.dense).isdisjoint(self.names):
                source = Ranged(self.storage, part)
                reader = PartReader(self.storage, part, self.last, source=source, blocks=frozenset())
                self._copy({name: tensor for name, tensor in reader.dense().items() if name in self.names})
        self._copy(self.dense)

    def _objects(self) -> Iterable[Part | Stored]:
        specs, first = self.specs, int(self.continues)
        for number, entry in enumerate(self.path):
            for part in entry.parts:
                has_rows = number >= first and bool(wanted(part, specs))
                if has_rows or (entry is self.last and not set(part.dense).isdisjoint(self.names)):
                    yield part
                if has_rows and part.states is not None:
                    yield part.states

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            copy_from_host(self.held[name], tensor)
