"""A fleet of predictors that follow pins, on a stream in a directory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import ModelTarget, Predictor, Rollout
from delta_tracker.errors import StreamError
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import promote
from delta_tracker.stream.pin import PinReader
from delta_tracker.stream.reading.canary import Canary
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.breaking import Breaking
from tests.stream.streams import FQN, Writer


class Fleet:
    """A writer, the bits of each of its versions, and predictors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = Storage(path.as_uri(), create=True)
        self.writer = Writer(self.storage)
        self.bits: dict[int, torch.Tensor] = {}
        self.models: list[dict[str, torch.Tensor]] = []
        self.predictors: list[Predictor] = []
        self.tables: dict[Predictor, Any] = {}
        self.published("snapshot")

    @property
    def newest(self) -> int:
        """The newest version of the present writer."""
        return self.writer.claim.head.version

    def published(self, kind: str) -> int:
        if kind == "claim":
            self.writer.claim = StreamLog(self.storage).claim()
            kind = "snapshot"
        if kind == "snapshot":
            self.writer.change([0])
        entry = self.writer.snapshot() if kind == "snapshot" else self.writer.delta(sorted(random.sample(range(20), 3)))
        self.bits[entry.version] = self.writer.table.clone()
        return entry.version

    def deltas(self, count: int) -> int:
        """Publish some deltas, and return the last version."""
        return [self.published("delta") for _ in range(count)][-1]

    def promoted(self) -> None:
        """Begin another stream in the log."""
        promote(self.storage)
        self.writer = Writer(self.storage)

    def damage(self, version: int) -> None:
        """Delete the parts of a version."""
        entry = StreamLog(self.storage).read(version)
        assert entry is not None
        for part in entry.parts:
            self.storage.delete(part.name)

    def copy(self) -> Path:
        """Copy the store, and return the copy."""
        return shutil.copytree(self.path, self.path.with_name(f"{self.path.name}-copy"))

    def put_back(self, copy: Path) -> None:
        """Replace the store by an older copy."""
        for each in self.path.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
        shutil.copytree(copy, self.path, dirs_exist_ok=True)

    def join(
        self,
        *,
        follows_pins: bool = True,
        storage: Storage | list[Storage] | None = None,
        canary: Canary | None = None,
        is_fragile: bool = False,
    ) -> Predictor:
        """Add a predictor. A fragile one has a table of four chunks, in ``tables``, whose writes can fail."""
        model = self.writer.model()
        tables: dict[str, Any] = {FQN: Breaking.of(model[FQN])} if is_fragile else model
        predictor = Predictor(
            ModelTarget(tables, chunk_rows=5 if is_fragile else 4096),
            self.storage if storage is None else storage,
            rollout=Rollout(follows_pins=follows_pins, canary=canary),
        )
        if follows_pins:
            for source in predictor._reader.sources.all:
                source.pins = PinReader(seconds=0.0)
        self.models.append(model)
        self.tables[predictor] = tables[FQN]
        self.predictors.append(predictor)
        return predictor

    def rows_of(self, predictor: Predictor) -> torch.Tensor:
        """Return the table of a predictor."""
        return self.models[self.predictors.index(predictor)][FQN]

    def leave(self, predictor: Predictor) -> None:
        """Remove a predictor."""
        del self.models[self.predictors.index(predictor)], self.tables[predictor]
        self.predictors.remove(predictor)

    def restart(self, position: dict[str, str | int], rows: torch.Tensor) -> Predictor:
        """Add a predictor that starts from a position and rows that were saved."""
        predictor = self.join(is_fragile=True)
        predictor.load_state_dict(position)
        self.rows_of(predictor).copy_(rows)
        return predictor

    def fails(self, predictor: Predictor, *, after: int) -> None:
        """Let a fragile predictor fail after some chunks of the next version."""
        self.tables[predictor].left = after
        with pytest.raises(RuntimeError, match="device lost"):
            predictor.sync()

    def assert_holds(self, predictor: Predictor, version: int) -> None:
        assert predictor.version == version
        assert torch.equal(self.rows_of(predictor), self.bits[version])


def steps(predictor: Predictor) -> list[int | str]:
    """Return the versions that a predictor applies, one by one, until nothing moves, or a call fails."""
    seen: list[int | str] = []
    while len(seen) < 30:
        try:
            version = predictor.sync(1)
        except StreamError as error:
            return [*seen, type(error).__name__]
        if version in seen[-1:]:
            break
        seen.append(version)
    return seen
