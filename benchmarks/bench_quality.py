"""Prediction quality by published bytes: ``python -m benchmarks.bench_quality``.

MovieLens-100K in time order, as in the demo but on one rank. All publishing strategies follow the same training run,
each with its own publisher, stream and predictor. A predictor scores the ratings between two versions with the rows of
the first version; then the trainer trains on them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from benchmarks.harness import Report, Sample, parser
from benchmarks.workloads import one_rank
from delta_tracker import DeltaRows, Encoding, ModelDeltaTracker, Predictor, Publisher, Storage, TopK, TrackingMode
from delta_tracker.stream.format.manifest import Manifest
from examples.movielens.data import Ratings, load_ratings
from examples.movielens.model import FactorizationMachine
from examples.movielens.settings import Settings
from examples.movielens.trainer import sharded_model

_SHARES = (0.5, 0.2, 0.1, 0.05, 0.02)
_INTERVALS = (1, 8, 16, 32, 64, 96)
_SNAPSHOTS, _FRESH = "snapshot, every version", "all rows, F32"
_GOAL_LOSS, _GOAL_BYTES = 0.001, 13
_COLORS = {
    "snapshot": "C1",
    "all rows": "C2",
    "top-k, INT8": "C3",
    "top-k, INT4": "C4",
    "top-k, F32": "C0",
    "random rows, F32": "C7",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A publishing strategy.

    Args:
        name: name in the table.
        family: line of the plot.
        encoding: encoding of the rows.
        top_k: selection of the rows of a delta.
        interval: number of versions between snapshots; None to publish a delta at every version.
    """

    name: str
    family: str
    encoding: Encoding = Encoding.F32
    top_k: TopK | None = None
    interval: int | None = None


def _ways(num_versions: int, rows_per_delta: float, generator: torch.Generator) -> Iterator[_Way]:
    """Yield the compared strategies. Shares are relative to the mean number of rows that change between versions."""

    def luck(_: str, rows: DeltaRows) -> Tensor:
        return torch.rand(len(rows), generator=generator)

    def rows(share: float) -> int:
        return max(1, round(share * rows_per_delta))

    for interval in (each for each in _INTERVALS if each <= num_versions):
        name = _SNAPSHOTS if interval == 1 else f"snapshot, every {interval} versions"
        yield _Way(name=name, family="snapshot", interval=interval)
    for encoding in (Encoding.F32, Encoding.F16, Encoding.INT8, Encoding.INT4):
        yield _Way(name=f"all rows, {encoding}", family="all rows", encoding=encoding)
    for share, encoding in ((0.5, Encoding.INT8), (0.5, Encoding.INT4), (0.2, Encoding.INT8)):
        top_k = TopK(rows=rows(share))
        yield _Way(name=f"top-k {share:.0%}, {encoding}", family=f"top-k, {encoding}", encoding=encoding, top_k=top_k)
    for family, score in (("top-k", None), ("random rows", luck)):
        for share in _SHARES:
            top_k = TopK(rows=rows(share), score=score)
            yield _Way(name=f"{family} {share:.0%}, F32", family=f"{family}, F32", top_k=top_k)


class _Follower:
    """A publishing strategy with its predictor."""

    def __init__(self, way: _Way, tracker: ModelDeltaTracker, table_rows: Mapping[str, int], dim: int) -> None:
        storage = Storage("memory://")
        self._way = way
        self._publisher = Publisher(tracker, storage, way.name, top_k=way.top_k, encoding=way.encoding)
        self.model = FactorizationMachine(table_rows, dim, torch.device("cpu"))
        self._predictor = Predictor(self.model, storage)
        self.num_rows = self.num_bytes = 0
        self.losses: list[Tensor] = []

    def publish(self, number: int) -> None:
        """Publish and apply version ``number``, if the strategy publishes it."""
        interval = self._way.interval
        if number and interval is not None and number % interval:
            return
        is_full = number == 0 or interval is not None
        manifest = self._publisher.snapshot() if is_full else self._publisher.publish()
        assert self._predictor.sync(limit=1) == manifest.version, "the predictor holds another version"
        if number:  # the first snapshot is the same for all strategies
            self.num_rows += manifest.num_rows
            self.num_bytes += _num_bytes(manifest)

    def score(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        """Store the log loss of each rating."""
        with torch.no_grad():
            logits = self.model(features)
        self.losses.append(nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none"))

    def close(self) -> dict[str, float]:
        """Close the publisher. Return mean log loss, bytes and rows of all versions after the first."""
        self._publisher.close()
        loss = float(torch.cat(self.losses).double().mean())
        return {"log loss": loss, "bytes": float(self.num_bytes), "rows": float(self.num_rows)}


def _num_bytes(manifest: Manifest) -> int:
    """Return the bytes of a version's parts, including headers, and of its entry."""
    return manifest.num_bytes + len(manifest.to_json())


def _run(settings: Settings, seed: int) -> dict[str, dict[str, float]]:
    """Train once in time order and return the figures of each strategy. Runs in its own process."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with one_rank():
        found = _train(load_ratings(settings.ratings), settings, torch.Generator().manual_seed(seed))
    fresh, snapshots = found[_FRESH], found[_SNAPSHOTS]
    assert fresh["log loss"] == snapshots["log loss"], "deltas and snapshots lead to different predictions"
    for figures in found.values():
        figures["over fresh"] = figures["log loss"] / fresh["log loss"] - 1
        figures["times fewer"] = snapshots["bytes"] / figures["bytes"]
    return found


def _train(ratings: Ratings, settings: Settings, generator: torch.Generator) -> dict[str, dict[str, float]]:
    model = sharded_model(ratings, settings)
    ways = list(_ways(_num_versions(settings), _rows_per_delta(ratings, settings), generator))
    with ModelDeltaTracker(model, [way.name for way in ways], mode=TrackingMode.EMBEDDING) as tracker:
        followers = {way.name: _Follower(way, tracker, ratings.table_rows, settings.dim) for way in ways}
        for batch in range(settings.num_batches):
            number, place = divmod(batch - settings.warmup_batches, settings.every)
            if number >= 0 and place == 0:
                stretch = slice(batch * settings.batch, (batch + settings.every) * settings.batch)
                features = model.module.jagged(ratings.ids[:, stretch])
                for follower in followers.values():
                    follower.publish(number)
                    follower.score(features, ratings.labels[stretch])
                for exact in (_SNAPSHOTS, _FRESH):
                    _check_equal(followers[exact].model, tracker)
            mine = slice(batch * settings.batch, (batch + 1) * settings.batch)
            logits = model(model.module.jagged(ratings.ids[:, mine]))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, ratings.labels[mine])
            loss.backward()  # type: ignore[no-untyped-call]  # the fused optimizer updates the rows here
            tracker.step()
        return {name: follower.close() for name, follower in followers.items()}


def _num_versions(settings: Settings) -> int:
    """Return the number of versions after the first snapshot."""
    return -(-(settings.num_batches - settings.warmup_batches) // settings.every) - 1


def _rows_per_delta(ratings: Ratings, settings: Settings) -> float:
    """Return the mean number of rows that change between versions."""
    size = settings.every * settings.batch
    starts = range(settings.warmup_batches * settings.batch, ratings.ids.shape[1], size)
    return float(
        np.mean([sum(len(np.unique(ids)) for ids in ratings.ids[:, first : first + size]) for first in starts])
    )


def _check_equal(model: FactorizationMachine, tracker: ModelDeltaTracker) -> None:
    for name, table in model.state_dict().items():
        (held,) = tracker.live.column_views(name.removesuffix(".weight"))
        assert torch.equal(table.view(torch.int32), held.view(torch.int32)), f"{name} is not the trainer's"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check the predictors that receive all rows, and write the results."""
    arguments = parser("bench_quality", __doc__ or "")
    options = arguments.parse_args(argv)
    seeds = range(options.repeats or (1 if options.tiny else 3))
    settings = Settings(out=Path(), ratings=1024 if options.tiny else 100_000)
    workers = min(len(seeds), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(partial(_run, settings), seeds))
    found = {way: {name: Sample(tuple(run[way][name] for run in runs)) for name in runs[0][way]} for way in runs[0]}
    num_versions = _num_versions(settings)
    report = Report(
        name="bench_quality",
        settings={
            "ratings": settings.ratings,
            "ratings of a batch": settings.batch,
            "batches of a version": settings.every,
            "columns": settings.dim,
            "seeds": len(seeds),
        },
        columns=("published", "rows a version", "kB a version", "times fewer bytes", "log loss", "over fresh, %"),
    )
    _report(report, found, num_versions)
    report.finish(options.out)
    if not options.tiny:
        _plot(found, num_versions, options.out / "bench_quality.png")
    return 0


def _report(report: Report, found: Mapping[str, Mapping[str, Sample]], num_versions: int) -> None:
    for name, sample in found.items():
        report.add(name, sample)
        report.lines.append(
            (
                name,
                sample["rows"].text(1 / num_versions, 0),
                f"{sample['bytes'].median / num_versions / 1e3:.1f}",
                f"{sample['times fewer'].median:.1f}",
                f"{sample['log loss'].median:.4f}",
                sample["over fresh"].text(100, 2),
            )
        )
    good = [name for name, sample in found.items() if sample["over fresh"].median <= _GOAL_LOSS]
    best = max(good, key=lambda name: found[name]["times fewer"].median)
    report.notes += [
        (
            f"Within {_GOAL_LOSS:.1%} of the fresh log loss, the fewest bytes: {best},"
            f" {found[best]['times fewer'].median:.1f} times fewer than a snapshot with every version (goal:"
            f" {_GOAL_BYTES})."
        ),
        (
            f"Figures are per version, of the {num_versions} versions after the first snapshot, with headers, ids and"
            " entries. Top-k and random rows are shares of the rows that change between versions; rows left out stay"
            " pending. Medians over the seeds (smallest-largest)."
        ),
    ]


def _plot(found: Mapping[str, Mapping[str, Sample]], num_versions: int, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import, only needed here

    lines: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    families = {way.name: way.family for way in _ways(num_versions, 1.0, torch.Generator())}
    for name, sample in found.items():
        lines[families[name]].append((sample["bytes"].median / num_versions / 1e3, sample["log loss"].median))
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for family, points in lines.items():
        style = "o" if family == "all rows" else "o-"
        axes.plot(*zip(*sorted(points), strict=True), style, color=_COLORS[family], label=family, markersize=5)
    for encoding in (Encoding.F32, Encoding.F16, Encoding.INT8, Encoding.INT4):
        sample = found[f"all rows, {encoding}"]
        place = sample["bytes"].median / num_versions / 1e3, sample["log loss"].median
        axes.annotate(str(encoding), place, xytext=(4, 5), textcoords="offset points", fontsize=8)
    fresh = found[_FRESH]["log loss"].median
    axes.axhspan(fresh, fresh * (1 + _GOAL_LOSS), color="C2", alpha=0.2, label=f"fresh + {_GOAL_LOSS:.1%}")
    goal = found[_SNAPSHOTS]["bytes"].median / num_versions / 1e3 / _GOAL_BYTES
    axes.axvline(goal, color="0.6", linestyle=":", label=f"{_GOAL_BYTES} times fewer bytes than snapshots")
    axes.set(xscale="log", xlabel="kB published per version (log scale)", ylabel="log loss of the next ratings")
    axes.set_title("MovieLens-100K in time order: quality by published bytes", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
