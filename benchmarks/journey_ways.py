"""Ways to publish of ``bench_journey``, each with its own publisher, stream and predictor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.journey import Purchases, TwoTower
from delta_tracker import (
    Cadence,
    DeltaRows,
    Encoding,
    ModelDeltaTracker,
    Predictor,
    Publisher,
    Retention,
    Storage,
    TopK,
)
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import retain

KEPT = 8
"""Versions that a stream with retention keeps, and between two compactions."""
HOUR = 3600
_TIMES = {"30 days": 720 * HOUR, "7 days": 168 * HOUR, "day": 24 * HOUR, "hour": HOUR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a run, in purchases; ``cadences`` are multiples of ``batch``, and ``num_scored`` of all of them."""

    batch: int
    warm_up: int
    num_scored: int
    cadences: tuple[int, ...]
    table_rows: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to publish: every ``events`` purchases, or at each new ``seconds`` of the purchases' time, or never."""

    name: str
    events: int | None = None
    seconds: int | None = None
    is_full: bool = False
    encoding: Encoding = Encoding.F32
    top_k: TopK | None = None


def ways(size: Size, rows_per_delta: float) -> Iterator[Way]:
    """Yield the ways. Shares are of the mean number of ids that occur between two versions."""
    generator = torch.Generator().manual_seed(0)

    def luck(_: str, rows: DeltaRows) -> Tensor:
        return torch.rand(len(rows), generator=generator)

    yield Way(name="frozen")
    for name, seconds in _TIMES.items():
        yield Way(name=f"each {name}", seconds=seconds)
    yield Way(name="each batch", events=size.batch)
    for events in size.cadences:
        yield Way(name=f"{events:,}: full", events=events, is_full=True)
        for encoding in (Encoding.F32, Encoding.INT8):
            yield Way(name=f"{events:,}: {encoding}", events=events, encoding=encoding)
    events = size.cadences[0]
    for encoding in (Encoding.F16, Encoding.INT4):
        yield Way(name=f"{events:,}: {encoding}", events=events, encoding=encoding)
    for encoding, shares in ((Encoding.INT8, (0.5, 0.2, 0.1, 0.05)), (Encoding.INT4, (0.5, 0.2))):
        for share in shares:
            top_k = TopK(max(1, round(share * rows_per_delta)))
            yield Way(name=f"{events:,}: top {share:.0%}, {encoding}", events=events, encoding=encoding, top_k=top_k)
    top_k = TopK(max(1, round(0.2 * rows_per_delta)), score=luck)
    name = f"{events:,}: random 20%, {Encoding.INT8}"
    yield Way(name=name, events=events, encoding=Encoding.INT8, top_k=top_k)


class Follower:
    """A way to publish, with its stream and its predictor."""

    def __init__(self, way: Way, tracker: ModelDeltaTracker, purchases: Purchases, size: Size) -> None:
        self.way = way
        self._purchases, self._size, self._tracker = purchases, size, tracker
        self._storage = Storage("memory://")
        self._log = StreamLog(self._storage)
        batches = None if way.events is None else way.events // size.batch
        cadence = None if batches is None or way.is_full else Cadence(batches=batches)
        self._publisher = Publisher(
            tracker,
            self._storage,
            way.name,
            top_k=way.top_k,
            dense=True,
            encoding=way.encoding,
            cadence=cadence,
        )
        self.model = TwoTower(size.table_rows).eval()
        self._predictor = Predictor(self.model, self._storage)
        self._has_cadence = cadence is not None
        self._scored = size.warm_up
        self.logits: list[Tensor] = []
        self.rows: list[int] = []
        self.num_bytes: list[int] = []
        self.kept: list[int] = []
        self.merged = 0
        first = self._publisher.snapshot()
        self.first_bytes = _num_bytes(first)
        self._apply(first)

    def step(self, end: int) -> None:
        """Publish if a version is due after the purchases before ``end``. The predictor first scores up to them."""
        before = self._publisher.version
        if self._has_cadence:
            self._publisher.step()
        if not self._is_due(end):
            return
        self.score(end)
        if self._has_cadence:
            while self._publisher.version == before and self._publisher.error is None:
                time.sleep(1e-4)  # it is written by another thread
            assert self._publisher.error is None, self._publisher.error
            manifest = self._log.head()
            assert manifest is not None
        else:
            manifest = self._publisher.snapshot() if self.way.is_full else self._publisher.publish()
        assert manifest.version == before + 1, "a version was skipped"
        self._apply(manifest)
        self.rows.append(manifest.num_rows)
        self.num_bytes.append(_num_bytes(manifest))
        self._keep_house()

    def score(self, end: int) -> None:
        """Append the logits of the purchases and negatives from the last call to ``end``."""
        for first in range(self._scored, end, self._size.cadences[0]):
            features, _ = self._purchases.examples(slice(first, min(end, first + self._size.cadences[0])))
            with torch.no_grad(), self._predictor.reading():
                self.logits.append(self.model(features).view(2, -1))
        self._scored = end

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def check(self) -> None:
        """Check that rows, raw ids and dense tensors are the trainer's, bit for bit."""
        trained = {name.removeprefix("module."): each for name, each in self._tracker.model.named_parameters()}
        owners = self._tracker.live.owner_views()
        for name, held in self.model.named_parameters():
            fqn = name.removesuffix(".weight")
            wanted = self._tracker.live.column_views(fqn)[0] if fqn in owners else trained[name]
            assert torch.equal(held.view(torch.int32), wanted.view(torch.int32)), f"{self.way.name}: {name} differs"
            if fqn in owners:
                collisions = self.model.rows._managed_collision_collection._managed_collision_modules  # noqa: SLF001
                module = collisions[fqn.rpartition(".")[2]]
                ids, rows = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping  # noqa: SLF001
                found = torch.empty_like(owners[fqn])
                found[rows] = ids
                assert torch.equal(found, owners[fqn]), f"{self.way.name}: raw ids of {name} differ"

    @property
    def is_exact(self) -> bool:
        """True if each version has all changed rows, not rounded."""
        return self.way.encoding is Encoding.F32 and self.way.top_k is None

    def _is_due(self, end: int) -> bool:
        if self.way.events is not None:
            return (end - self._size.warm_up) % self.way.events == 0
        if self.way.seconds is None:
            return False
        last, this = self._purchases.seconds[[end - 1 - self._size.batch, end - 1]].tolist()
        return bool(last // self.way.seconds != this // self.way.seconds)

    def _apply(self, manifest: Manifest) -> None:
        assert self._predictor.sync() == manifest.version, f"{self.way.name}: the predictor holds another version"

    def _keep_house(self) -> None:
        """Compact and apply the retention. Hours pass between two versions, so no reader is late."""
        if not self.way.is_full and len(self.rows) % KEPT == 0:
            merged = compact(self._log)
            self.merged += 0 if merged is None else _num_bytes(merged)
        if self.way.is_full or len(self.rows) % KEPT == 0:
            retain(self._log, Retention(versions=KEPT, grace_seconds=0), now=lambda: time.time() + 24 * HOUR)
        folders = ("log", "merged", "parts")
        self.kept.append(sum(each.num_bytes for folder in folders for each in self._storage.objects(folder)))


def _num_bytes(manifest: Manifest) -> int:
    """Return the bytes of a version's parts, including headers, and of its entry."""
    return manifest.num_bytes + len(manifest.to_json())
