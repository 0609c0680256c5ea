"""Report of a run: a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table
from torchmetrics.functional.classification import binary_auroc

from examples.movielens.data import load_ratings
from examples.movielens.settings import WORLD_SIZE, Settings

Values = NDArray[np.float32]
READERS = {
    "trainer": ("trainer, before it learns each batch", "#7f7f7f"),
    "fresh": ("predictor, fresh", "#1b7f5c"),
    "frozen": ("predictor, frozen at the snapshot", "#c2452d"),
}
"""Label and color of each compared model."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for the ratings after the warm-up, in time order."""

    logits: dict[str, Values]
    """``[M]`` for each of ``READERS``."""
    labels: Values
    """``[M]``."""

    def losses(self, reader: str) -> Values:
        """Return the ``[M]`` log losses of the ratings."""
        loss: Values = np.logaddexp(0, self.logits[reader]) - self.labels * self.logits[reader]
        return loss

    def auc(self, reader: str) -> float:
        """Return the area under the ROC curve over all ratings."""
        return float(binary_auroc(torch.from_numpy(self.logits[reader]), torch.from_numpy(self.labels).int()))


def load_predictions(settings: Settings) -> Predictions:
    """Read the predictions from the work folder."""
    logits = {name: np.load(settings.work / f"{name}-logits.npy") for name in ("fresh", "frozen")}
    shares = [np.load(settings.work / f"trainer-logits.{rank}.npy") for rank in range(WORLD_SIZE)]
    logits["trainer"] = np.concatenate(shares, axis=1).ravel()  # concatenate the [batches, B] of each rank
    used = slice(settings.warmup_batches * settings.batch, settings.num_batches * settings.batch)
    labels: Values = load_ratings(settings.ratings).labels[used].numpy()
    return Predictions(logits, labels)


def summary(applied: list[dict[str, Any]], predictions: Predictions) -> Table:
    """Return the table that the demo prints at its end; ``applied`` has one event per version."""
    snapshot, *deltas = applied
    rows, size = (float(np.median([delta[key] for delta in deltas])) for key in ("num_rows", "num_bytes"))
    p50, p99 = np.percentile([1000 * delta["seconds"] for delta in deltas], [50, 99])
    table = Table(show_header=False, title=f"MovieLens-100K, {len(predictions.labels):,} ratings after the warm-up")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("versions applied", "1 snapshot", f"{len(deltas):,} deltas")
    table.add_row("full snapshot", f"{snapshot['num_rows']:,} rows", f"{snapshot['num_bytes'] / 1000:,.1f} kB")
    table.add_row("a delta (median)", f"{rows:,.0f} rows", f"{size / 1000:,.1f} kB")
    table.add_row("a delta / the snapshot", f"{rows / snapshot['num_rows']:.1%}", f"{size / snapshot['num_bytes']:.1%}")
    if evicted := sum(delta["evicted"] for delta in deltas):
        table.add_row("evicted ids", f"{evicted:,}", f"{evicted / len(deltas):.1f} per delta")
    table.add_row("commit to applied", f"p50 {p50:.1f} ms", f"p99 {p99:.1f} ms", end_section=True)
    for reader, (label, _) in READERS.items():
        loss, auc = predictions.losses(reader).mean(), predictions.auc(reader)
        style = "bold" if reader == "fresh" else None
        table.add_row(label, f"log loss {loss:.4f}", f"AUC {auc:.4f}", style=style)
    return table


def draw(predictions: Predictions, settings: Settings, path: Path, applied: list[dict[str, Any]]) -> None:
    """Draw the rolling log loss, and with managed collisions the evictions of each version in ``applied``."""
    first_rating = settings.warmup_batches * settings.batch
    window = max(1, min(4000, len(predictions.labels) // 8))
    rolling = {
        reader: np.convolve(predictions.losses(reader), np.full(window, 1 / window), mode="valid") for reader in READERS
    }
    x = first_rating + window + np.arange(len(rolling["fresh"]))
    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")  # needs no display, unlike pyplot
    if settings.zch:
        axes, bars = figure.subplots(2, sharex=True, height_ratios=[3, 1])
        deltas = [each for each in applied if each["kind"] == "delta"]
        ratings = [each["batches"] * settings.batch for each in deltas]
        bars.bar(ratings, [each["evicted"] for each in deltas], width=settings.every * settings.batch, color="#4c6fae")
        bars.set_ylabel("evicted ids\nper version")
        bars.spines[["top", "right"]].set_visible(False)
    else:
        axes = figure.subplots()
    axes.fill_between(x, rolling["fresh"], rolling["frozen"], color=READERS["fresh"][1], alpha=0.10, linewidth=0)
    for reader, (label, color) in READERS.items():
        width, style = (1.2, "--") if reader == "trainer" else (2.0, "-")
        axes.plot(x, rolling[reader], label=label, color=color, linewidth=width, linestyle=style)
    axes.set_title("What fresh tables are worth: MovieLens-100K in time order", loc="left", fontweight="bold")
    (bars if settings.zch else axes).set_xlabel("ratings seen so far")
    axes.set_ylabel(f"log loss, mean of the last {window:,} ratings")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.01, y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", ncols=len(READERS))
    figure.savefig(path)
