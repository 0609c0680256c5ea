"""What the demo's processes agree on: one file in the output folder that all of them read."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

WORLD_SIZE: Final = 2
"""Trainer ranks."""
NUM_RATINGS: Final = 100_000
"""Ratings in the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the demo."""

    out: Path
    """Folder that everything is written to."""
    ratings: int = NUM_RATINGS
    """How many ratings to use, from the oldest on."""
    batch: int = 64
    """Ratings per training batch, all ranks together."""
    every: int = 4
    """Batches per delta."""
    warmup_share: float = 0.2
    """Share of the batches that comes before the snapshot."""
    dim: int = 16
    """Columns per table."""
    learning_rate: float = 0.05
    """Of the row-wise Adagrad."""
    patience_seconds: float = 60.0
    """How long a process waits for another one before it gives up."""

    def __post_init__(self) -> None:
        if self.batch < WORLD_SIZE or self.batch % WORLD_SIZE:
            raise ValueError(f"batch={self.batch} cannot be split: give a multiple of {WORLD_SIZE}")
        if self.every < 1:
            raise ValueError(f"every={self.every} would never publish: give 1 or more")
        if self.ratings > NUM_RATINGS:
            raise ValueError(f"ratings={self.ratings} are more than there are: give {NUM_RATINGS} or fewer")
        if not 0 < self.warmup_batches < self.num_batches:
            raise ValueError(f"ratings={self.ratings} are too few for batches of {self.batch}: give more ratings")

    @property
    def num_batches(self) -> int:
        """Whole batches; the few ratings after the last one are not used."""
        return self.ratings // self.batch

    @property
    def warmup_batches(self) -> int:
        """Batches before the snapshot."""
        return int(self.num_batches * self.warmup_share)

    @property
    def stream(self) -> Path:
        """Folder that the publisher writes to and the predictor follows."""
        return self.out.resolve() / "stream"

    @property
    def work(self) -> Path:
        """Folder for what the processes hand to the report."""
        return self.out.resolve() / "work"

    def save(self) -> None:
        """Write the settings into the output folder."""
        values = asdict(self) | {"out": str(self.out)}
        settings_path(self.out).write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, out: Path) -> Settings:
        """Read the settings of the run in folder ``out``."""
        values = json.loads(settings_path(out).read_text())
        return cls(**values | {"out": out})


def settings_path(out: Path) -> Path:
    """The settings file of folder ``out``; its presence says that the folder is the demo's own."""
    return out / "movielens-demo.json"


def emit(event: str, **values: object) -> None:
    """Tell the parent process: one JSON object per line."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()
