"""What a random trainer has in common in all its lives, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from delta_tracker import Encoding, TopK, TrackingMode, Upkeep
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.stream.maintenance.retention import Retention
from tests.system.random_fault import FAULTS
from tests.system.random_models import Collection, draw_collections, draw_specs

_MODES = {
    TrackingMode.ID_ONLY: 3,
    TrackingMode.EMBEDDING: 3,
    TrackingMode.MOMENTUM_LAST: 1,
    TrackingMode.MOMENTUM_DIFF: 1,
}


@dataclass(frozen=True)
class Job:
    """What all lives of a seed have in common.

    Args:
        seed: the seed.
        mode: mode of the tracker.
        world_sizes: number of ranks of each life.
        collections: the model.
        fault: kind of the fault in each life.
        has_states: True if the versions have the states of the optimizers.
        begins: how each life begins: "new", "checkpoint" or "stream".
        publishing: arguments of the publisher.
        encodings: encoding by FQN.
        max_bytes: argument of the tracker.
    """

    seed: int
    mode: TrackingMode
    world_sizes: tuple[int, ...]
    collections: tuple[Collection, ...]
    fault: str
    has_states: bool
    begins: tuple[str, ...]
    publishing: Mapping[str, Any]
    encodings: Mapping[str, Encoding]
    max_bytes: int | None

    @classmethod
    def of(cls, seed: int) -> Job:
        """Return the job of a seed."""
        draw = random.Random(f"job of {seed}")
        mode = draw.choices([*_MODES], [*_MODES.values()])[0]
        has_grid = seed % 8 == 7
        world_sizes = (4 if has_grid else 2, *draw.choices([1, 2, 4], k=draw.choice([1, 2])))
        has_states = draw.random() < 0.5
        collections = draw_collections(draw, mode, world_sizes, has_dense=not has_states, has_grid=has_grid)
        later = [
            draw.choice(["stream", "stream", "checkpoint"] if has_states else ["checkpoint"] * 5 + ["new"])
            for _ in world_sizes[1:]
        ]
        has_top_k = not has_states and draw.random() < 0.3
        encodings: dict[str, Encoding] = {}
        if not has_states and draw.random() < 0.35:
            for collection in collections:
                for layout in collection.layouts:
                    kinds = [Encoding.F16, Encoding.BF16, Encoding.INT8] + [Encoding.INT4] * (layout.table.dim % 4 == 0)
                    encodings[collection.fqn(layout.table.name)] = draw.choice(kinds)
        publishing = {
            "top_k": TopK(rows=draw.choice([5, 20]), score=None if mode is not TrackingMode.ID_ONLY else sum_of_columns)
            if has_top_k
            else None,
            "encoding": encodings or None,
            "cadence": Cadence(
                batches=draw.choice([1, 2, 4]), snapshot_every=draw.choice([None, 4]), vote_every=draw.choice([1, 1, 2])
            ),
            "upkeep": Upkeep(
                retention=Retention(versions=3, grace_seconds=0) if draw.random() < 0.3 else None,
                compact_every=draw.choice([None, None, 2, 3]),
                pointer_seconds=None,
            ),
        }
        return cls(
            seed,
            mode,
            world_sizes,
            tuple(collections),
            FAULTS[seed % len(FAULTS)],
            has_states,
            ("new", *later),
            publishing,
            encodings,
            draw.choice([None, None, None, None, 30_000]),
        )

    @property
    def has_dense(self) -> bool:
        """Whether the stream has the dense layers."""
        return self.seed % 2 == 0

    def describe(self) -> str:
        """Return the job in a few lines."""
        lines = [
            f"{self.mode.name}, ranks {self.world_sizes}, begins {self.begins}, fault {self.fault}, {self.max_bytes=}"
        ]
        lines.append(", ".join(f"{name}={value}" for name, value in self.publishing.items() if value is not None))
        for life, world_size in enumerate(self.world_sizes):
            for collection, spec in zip(
                self.collections, draw_specs(self.draw(life), self.collections, world_size), strict=True
            ):
                kind = f"bag {collection.pooling}" if collection.is_bag else "sequence"
                lines.append(f"life {life}, {collection.name}: {kind}{' weighted' * collection.is_weighted}")
                lines += [
                    f"    {table.name}: {table.rows} x {table.dim} {table.dtype}, {table.sharding}, {table.kernel}, "
                    f"{layout.optimizer}, features {table.features}"
                    for layout, table in zip(collection.layouts, spec.tables, strict=True)
                ]
        return "\n".join(lines)

    def draw(self, life: int) -> random.Random:
        """Return the random generator of a life, the same on all ranks."""
        return random.Random(f"life {life} of {self.seed}")


def sum_of_columns(_: str, rows: Any) -> Tensor:
    """Return a score of rows for top-k in any mode."""
    return rows.values.float().sum(1).abs()
