"""Settings of the demo, in a file in the output folder that all processes read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

WORLD_SIZE: Final = 2
"""Trainer ranks."""
NUM_RATINGS: Final = 100_000
"""Ratings in the data set."""
MAX_ZCH: Final = 2.0
"""Largest share of rows; above 1, no id is ever evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one run of the demo."""

    out: Path
    """Output folder."""
    ratings: int = NUM_RATINGS
    """Number of ratings to use, oldest first."""
    batch: int = 64
    """Ratings per training batch, all ranks together."""
    every: int = 4
    """Batches per delta."""
    warmup_share: float = 0.2
    """Share of the batches before the snapshot."""
    dim: int = 16
    """Columns per table."""
    learning_rate: float = 0.05
    """Learning rate of the row-wise Adagrad."""
    zch: float = 0.0
    """Rows of the tables of users and movies as a share of their ids, with managed collisions; 0 without them."""
    silence_seconds: float = 2.0
    """Seconds without a sign of the trainer after which a standby takes over, in the failover demo."""
    patience_seconds: float = 240.0
    """Seconds that a process waits for another one before it raises."""

    def __post_init__(self) -> None:
        if self.batch < WORLD_SIZE or self.batch % WORLD_SIZE:
            raise ValueError(f"batch={self.batch} cannot be split: pass a multiple of {WORLD_SIZE}")
        if self.every < 1:
            raise ValueError(f"every={self.every} would never publish: pass 1 or more")
        if not 0 <= self.zch <= MAX_ZCH:
            raise ValueError(f"zch={self.zch} is no share of the ids: pass 0 to {MAX_ZCH}")
        if self.ratings > NUM_RATINGS:
            raise ValueError(f"ratings={self.ratings} is more than the data set has: pass {NUM_RATINGS} or fewer")
        if not 0 < self.warmup_batches < self.num_batches:
            raise ValueError(f"ratings={self.ratings} is too few for batches of {self.batch}: pass more")

    @property
    def num_batches(self) -> int:
        """Number of full batches; the ratings after the last one are not used."""
        return self.ratings // self.batch

    @property
    def warmup_batches(self) -> int:
        """Number of batches before the snapshot."""
        return int(self.num_batches * self.warmup_share)

    @property
    def stream(self) -> Path:
        """Folder that the publisher writes to and the predictor follows."""
        return self.out.resolve() / "stream"

    @property
    def work(self) -> Path:
        """Folder for the files that the report reads."""
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
    """Return the settings file of folder ``out``; it marks the folder as the demo's."""
    return out / "movielens-demo.json"
