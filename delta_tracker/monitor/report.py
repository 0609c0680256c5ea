"""The dashboard's panels as a picture, drawn from a file that a ``JsonlSink`` wrote.

python -m delta_tracker.monitor.report metrics.jsonl report.png
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.monitor.library import DEFINITIONS
from delta_tracker.monitor.panels import PANELS, Panel
from delta_tracker.monitor.stat import Kind

_FIGURES = {Kind.COUNTER: ("sum",), Kind.GAUGE: ("value",), Kind.HISTOGRAM: ("p50", "p99")}
_COLUMNS, _WIDTH, _HEIGHT = 3, 5.0, 2.4

Curve = list[tuple[float, float]]
"""Seconds and values."""


def curves(lines: Iterable[str]) -> dict[Panel, dict[str, Curve]]:
    """What each panel shows: legend to curve. A counter is its rate per second over each window.

    Args:
        lines: of the file.

    Raises:
        InvalidArgumentError: for a line that is no JSON object.
    """
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record["kind"] == "window":
                found[record["name"]].append(record)
        except (ValueError, KeyError, TypeError) as error:
            remedy = "Pass a file that JsonlSink wrote"
            raise InvalidArgumentError("lines", f"line {number}: {line[:40]}", remedy) from error
    begin = min((record["time"] for records in found.values() for record in records), default=0.0)
    return {panel: _of_panel(panel, found[DEFINITIONS[panel.metric].name], begin) for panel in PANELS}


def draw(lines: Iterable[str], picture: str | Path) -> int:
    """Draw the panels that have data.

    Args:
        lines: of the file.
        picture: where it goes; its ending says the format.

    Returns:
        How many panels were drawn.

    Raises:
        InvalidArgumentError: for a line that is no JSON object, or if no panel has data.
        MissingExtraError: if matplotlib is not installed.
    """
    shown = {panel: by_legend for panel, by_legend in curves(lines).items() if by_legend}
    if not shown:
        raise InvalidArgumentError("lines", "none of a panel", "Pass a file with metrics of the library")
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "demo") from error
    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(_WIDTH * _COLUMNS, _HEIGHT * rows), layout="constrained")
    places = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for axes, (panel, by_legend) in zip(places, shown.items(), strict=False):
        for legend, curve in sorted(by_legend.items()):
            axes.plot(*zip(*curve, strict=True), label=legend, marker=".", markersize=3)
        unit = DEFINITIONS[panel.metric].unit
        per_second = "/s" if panel.kind is Kind.COUNTER else ""
        axes.set_title(f"{panel.row}: {panel.title}", fontsize=9)
        axes.set_ylabel(f"{unit or 'count'}{per_second}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    figure.savefig(picture, dpi=100)
    return len(shown)


def _of_panel(panel: Panel, records: Iterable[Mapping[str, Any]], begin: float) -> dict[str, Curve]:
    result: dict[str, Curve] = defaultdict(list)
    figures = _FIGURES[panel.kind]
    for record in records:
        labels = " ".join(str(record["labels"][label]) for label in panel.by) or panel.title
        for name in figures:
            value, seconds = record["values"].get(name), record["seconds"]
            if not isinstance(value, int | float) or (panel.kind is Kind.COUNTER and not seconds):
                continue  # no number, or a window too short for a rate
            legend = labels if len(figures) == 1 else f"{name} {labels}"
            shown = value / seconds if panel.kind is Kind.COUNTER else value
            result[legend].append((record["time"] - begin, shown))
    return dict(result)


if __name__ == "__main__":
    draw(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines(), sys.argv[2])
