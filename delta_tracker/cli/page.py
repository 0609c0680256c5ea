"""HTML page of a report: one self-contained file that needs no network access.

Positions in charts are percentages. Shapes are SVG paths in a view box of 1000 by 100 units, which the page stretches
to its width. Text is placed outside the SVG, because stretching would distort it.

Names and errors from a stream are untrusted, and the template escapes them. The content security policy of the page
allows only the page's own script, which sets text but never markup.
"""

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from delta_tracker.cli.text import count, duration, escaped, format_time, plural, short, size

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_SCRIPT = Path(__file__).with_name("report.js")
_NUM_SERIES = 8
_NUM_CARDS = 12
_NUM_TICKS = 6
_MAX_GAPS = 60  # gaps between bars are visible on a phone up to about 60 bars
_MINUTE, _DAY = 60.0, 86_400.0
WIDTH, HEIGHT = 1000, 100
_MAX_TICKS = 5
_STEPS = (1, 2, 5, 10)
_MIN_SLOT = 0.2  # percent of the axis

Figures = dict[str, Any]
"""Data of a report, as a JSON object."""

_in_utc = partial(format_time, zone=UTC)


def render(figures: Figures) -> str:
    """Return the HTML page for ``figures``, which :func:`~delta_tracker.cli.report.read_figures` returns."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escaped(value) if type(value) is str else value,
    )
    environment.filters.update(count=count, size=size, duration=duration, number=number, share=share, short=short)
    environment.filters["format_time"] = _in_utc
    script = _SCRIPT.read_text(encoding="utf-8")
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        figures=figures,
        sizes=_sizes(figures),
        moved=[table for table in figures["tables"] if table["moves"]["count"]],
        hot=[table for table in figures["tables"] if table["hottest"]][:_NUM_CARDS],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def number(value: float) -> str:
    """Format a number with three significant digits.

    Example:
        >>> number(0.02283), number(1234.5), number(1e-07)
        ('0.0228', '1,230', '1e-07')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"  # noqa: PLR2004  where commas begin


def share(value: float) -> str:
    """Format a fraction as a percentage, with more digits close to 0 % and 100 %.

    Example:
        >>> share(0.8776), share(0.00042), share(0.9996), share(1.0)
        ('88 %', '0.042 %', '99.96 %', '100 %')
    """
    percent = 100 * value
    near = min(abs(percent), abs(100 - percent))
    digits = 0 if near >= 1 or near == 0 else min(6, 1 - math.floor(math.log10(near)))
    text = f"{percent:.{digits}f}"
    return f"{text.rstrip('0') if digits else text} %"


@dataclass(frozen=True, slots=True)
class Tick:
    """Labeled tick on the axis of a chart.

    Args:
        position: distance from the left or bottom end of the axis, in percent of its length.
        label: text next to the tick.
        more: second line of the text, in a smaller font; empty for no second line.
    """

    position: float
    label: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """Horizontal range of one bar in a chart. ``left`` and ``width`` are in percent of the chart's width."""

    left: float
    width: float


def round_values(highest: float) -> list[float]:
    """Return evenly spaced round values for the ticks of an axis. The last value is at least ``highest``.

    The first value is 0. If ``highest`` is not positive, the last value is 1.

    Example:
        >>> round_values(37.0)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    highest = highest if highest > 0 else 1.0
    rough = highest / _MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _STEPS if power * each >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(highest / step * (1 - 1e-9)) + 1)]


def bars(slots: Sequence[Slot], heights: Sequence[float], below: Sequence[float], gap: float) -> str:
    """Return the data of an SVG path that draws the bars of a chart.

    ``heights`` are the heights of the bars, and ``below`` are the distances of their lower edges from the bottom of the
    chart. Both are in percent of the chart's height. ``gap`` is the fraction of each slot that is left empty.
    """
    width = WIDTH / 100
    steps = []
    for slot, height, bottom in zip(slots, heights, below, strict=True):
        if height > 0:
            left, across = width * (slot.left + slot.width * gap / 2), width * slot.width * (1 - gap)
            steps.append(f"M{_svg(left)} {_svg(HEIGHT - bottom)}v{_svg(-height)}h{_svg(across)}v{_svg(height)}z")
    return "".join(steps)


def chart_slots(spans: Sequence[tuple[float, float]], usual: float) -> list[Slot]:
    """Return the slot of a bar for each of ``spans``, which are ascending pairs of begin and end on an axis.

    A slot ends where its span ends. It begins where the previous slot ends, but at most ``usual`` before its span
    begins, so that long intervals without spans remain empty. The width of a slot is at least 0.2 %.

    Example:
        >>> [(slot.left, slot.width) for slot in chart_slots([(10.0, 10.0), (20.0, 20.0), (50.0, 50.0)], 10.0)]
        [(0.0, 20.0), (20.0, 20.0), (80.0, 20.0)]
    """
    low = spans[0][0] - usual
    length = (spans[-1][1] - low) or 1.0
    slots, before = [], low
    for begin, end in spans:
        left = 100 * (max(before, begin - usual) - low) / length
        right = 100 * (end - low) / length
        left = max(0.0, min(left, right - _MIN_SLOT))
        slots.append(Slot(left, max(right - left, _MIN_SLOT)))
        before = end
    return slots


def _svg(value: float) -> str:
    return f"{round(value, 2):g}"


def _time_axis(bins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slots, marks and ticks of a chart over time. ``bins`` must not be empty.

    Marks are the positions of snapshots and publisher restarts, in percent from the left, by CSS class. The label of a
    tick is a time and the newest version at this time.
    """
    pauses = sorted(each["gap_seconds"] / each["gaps"] for each in bins if each["gaps"])
    usual = pauses[len(pauses) // 2] if pauses else _MINUTE
    slots = chart_slots([(each["begin"], each["end"]) for each in bins], usual)
    marks = {
        "snapshot": [slot.left + slot.width / 2 for each, slot in zip(bins, slots, strict=True) if each["snapshots"]],
        "restart": [slot.left for each, slot in zip(bins, slots, strict=True) if each["restarts"]],
    }
    low, high = bins[0]["begin"] - usual, bins[-1]["end"]
    seconds = high - low
    form = "%H:%M:%S" if seconds < _NUM_TICKS * _MINUTE else "%H:%M"
    if _in_utc(low, "%Y-%m-%d") != _in_utc(high, "%Y-%m-%d"):
        form = "%Y-%m-%d" if seconds > _NUM_TICKS * _DAY else f"%m-%d {form}"
    ticks = []
    for index in range(_NUM_TICKS):
        position = 100 * index / (_NUM_TICKS - 1)
        time = low + seconds * position / 100
        past = [each["last"] for each in bins if each["end"] <= time]
        ticks.append(Tick(position, _in_utc(time, form), f"v{past[-1]}" if past else ""))
    return {"slots": slots, "marks": marks, "x_ticks": ticks}


def _sizes(figures: Figures) -> dict[str, Any] | None:
    """Return a stacked bar chart of the mean delta size in each bin, by table; None for a stream without versions.

    ``legend`` contains the label of each series by CSS class. ``shapes`` contains pairs of a CSS class and SVG path
    data, from back to front. ``tips`` contains the title and the values of the tooltip of each slot. The values are
    empty for a bin without deltas.
    """
    if not figures["bins"]:
        return None
    bins, tables = figures["bins"], figures["tables"]
    named = tables[:_NUM_SERIES]
    layers = {f"s{index}": table["bin_bytes"] for index, table in enumerate(named)}
    legend = {f"s{index}": short(table["name"]) for index, table in enumerate(named)}
    if len(tables) > len(named):
        layers["other"] = [sum(at) for at in zip(*(table["bin_bytes"] for table in tables[_NUM_SERIES:]), strict=True)]
        legend["other"] = plural(len(tables) - len(named), "other table")
    layers["rest"] = [
        max(0, each["delta_bytes"] - sum(layer[index] for layer in layers.values())) for index, each in enumerate(bins)
    ]
    legend["rest"] = "row ids, dense parameters, headers"
    means = {
        series: [total / (each["deltas"] or 1) for total, each in zip(layer, bins, strict=True)]
        for series, layer in layers.items()
    }
    ticks = round_values(max(sum(at) for at in zip(*means.values(), strict=True)))
    percent = HEIGHT / ticks[-1]
    chart = _time_axis(bins)
    below = [0.0] * len(bins)
    gap = 0.15 if len(bins) <= _MAX_GAPS else 0.0
    shapes = []
    for series, values in means.items():
        heights = [percent * value for value in values]
        shapes.append((series, bars(chart["slots"], heights, below, gap)))
        below = [start + height for start, height in zip(below, heights, strict=True)]
    tips = []
    for index, each in enumerate(bins):
        values = [size(layer[index]) for layer in means.values()] if each["deltas"] else []
        tips.append((f"{_version_title(each)} · {_contents(each)}", values))
    y_ticks = [Tick(round(percent * value, 2), size(value)) for value in ticks]
    return chart | {"legend": legend, "shapes": shapes, "y_ticks": y_ticks, "tips": tips}


def _version_title(each: dict[str, Any]) -> str:
    first, last = each["first"], each["last"]
    if first == last:
        return f"version {first} · {_in_utc(each['begin'])}"
    return f"versions {first} to {last} · {_in_utc(each['begin'])} to {_in_utc(each['end'], '%H:%M:%S')}"


def _contents(each: dict[str, Any]) -> str:
    found = []
    if each["deltas"]:
        whole = f", {size(each['delta_bytes'] / each['deltas'])} each on average" if each["deltas"] > 1 else ""
        found.append(f"{plural(each['deltas'], 'delta')} of {size(each['delta_bytes'])}{whole}")
    if each["snapshots"]:
        found.append(f"{plural(each['snapshots'], 'snapshot')} of {size(each['snapshot_bytes'])}")
    return " and ".join(found)
