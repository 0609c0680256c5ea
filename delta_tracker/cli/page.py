"""Render a report as one self-contained HTML file, which loads nothing from the network.

Names and errors from a stream are untrusted. The template escapes all of them. The content security policy of the page
allows only the page's own script, which sets text but never markup.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from delta_tracker.cli.charts import (
    Chart,
    Hit,
    Mark,
    Scale,
    Shape,
    Slot,
    Tick,
    bars,
    even_slots,
    line,
    linear,
    logarithmic,
    spread,
    time_ticks,
    timed_slots,
)
from delta_tracker.cli.figures import Figures
from delta_tracker.cli.text import count, duration, plain, size
from delta_tracker.errors import MissingExtraError

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_SCRIPT = Path(__file__).with_name("report.js")
_NUM_SERIES = 8
_NUM_CARDS = 12
_MAX_NAME = 72
_NUM_TICKS = 6
_MINUTE, _DAY = 60.0, 86_400.0


def render(figures: Figures) -> str:
    """Return the HTML page of a report.

    Args:
        figures: data of the report, returned by :func:`delta_tracker.cli.figures.gather`.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", "cli") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_harmless
    )
    environment.filters.update(count=count, size=size, duration=duration, number=number, share=share, short=short)
    environment.filters["moment"] = moment
    script = _SCRIPT.read_text(encoding="utf-8")
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        figures=figures,
        charts=_charts(figures),
        cards=[_card(table) for table in _moved(figures)],
        lines={table["name"]: _line(table["bin_bytes"], figures) for table in figures["tables"]},
        across=_across,
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
    """Format a fraction in percent, with more digits close to 0 % and 100 %.

    Example:
        >>> share(0.8776), share(0.00042), share(0.9996), share(1.0)
        ('88 %', '0.042 %', '99.96 %', '100 %')
    """
    percent = 100 * value
    near = min(abs(percent), abs(100 - percent))
    digits = 0 if near >= 1 or near == 0 else min(6, 1 - math.floor(math.log10(near)))
    text = f"{percent:.{digits}f}"
    return f"{text.rstrip('0') if digits else text} %"


def short(name: str) -> str:
    """Return ``name``. A name of more than 72 characters is cut to the first 24 and last 48, joined by an ellipsis."""
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 3]}…{name[-2 * _MAX_NAME // 3 :]}"


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format a Unix time in UTC with the strftime format ``form``; return ``unknown date`` for a time out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return "unknown date"


def _harmless(value: object) -> object:
    """Return a string with escaped control characters, and any other value unchanged.

    The template applies this to every value that it prints.
    """
    return plain(value) if type(value) is str else value


class _Axis:
    """Horizontal axis of the charts over the life of a stream: time, or versions if clocks contradict each other.

    Args:
        figures: data of the report, with at least one bin.
    """

    def __init__(self, figures: Figures) -> None:
        bins = self._bins = figures["bins"]
        self.is_time = figures["axis"] == "time"
        usual = sorted(each["gap_seconds"] / each["gaps"] for each in bins if each["gaps"])
        self._usual = usual[len(usual) // 2] if usual else 0.0
        spans = [(each["begin"], each["end"]) for each in bins]
        self.slots: list[Slot] = timed_slots(spans, self._usual) if self.is_time else even_slots(len(bins))

    def chart(self, about: str, legend: dict[str, str]) -> Chart:
        """Return a chart with this axis, to which the caller adds bars or lines.

        Marks show snapshots and publisher restarts.
        """
        chart = Chart(about=about, legend=legend)
        if self.is_time:
            chart.axis, chart.x_ticks = "time (UTC), and the newest version then", self._time_ticks()
        else:
            chart.axis = "version" if len(self._bins) == 1 else "version; not time, because the times do not ascend"
            for index in spread(len(self._bins), 6):
                chart.x_ticks.append(Tick(self.slots[index].middle, f"v{self._bins[index]['first']}"))
        for each, slot in zip(self._bins, self.slots, strict=True):
            if each["snapshots"]:
                chart.marks.append(Mark(slot.middle, "snapshot"))
            if each["restarts"]:
                chart.marks.append(Mark(slot.left, "restart"))
        return chart

    def _time_ticks(self) -> list[Tick]:
        """Return ticks at round times. A label has the date at the first tick and where the day changes."""
        low, high = self._bins[0]["begin"] - self._usual, self._bins[-1]["end"]
        form = "%H:%M:%S" if high - low < _NUM_TICKS * _MINUTE else "%H:%M"
        ticks, day = [], moment(low, "%Y-%m-%d")
        for time in time_ticks(low, high, _NUM_TICKS):
            before, day = day, moment(time, "%Y-%m-%d")
            label = day if high - low > _NUM_TICKS * _DAY else moment(time, form if day == before else f"%m-%d {form}")
            past = [each["last"] for each in self._bins if each["end"] <= time]
            ticks.append(Tick(100 * (time - low) / (high - low), label, f"v{past[-1]}" if past else ""))
        return ticks


def _charts(figures: Figures) -> dict[str, Chart]:
    """Return the charts over the life of the stream by name; empty for a stream without versions."""
    bins = figures["bins"]
    if not bins:
        return {}
    axis = _Axis(figures)
    return {"sizes": _sizes(figures, axis), "saved": _saved(bins, axis), "cadence": _cadence(bins, axis)}


def _sizes(figures: Figures, axis: _Axis) -> Chart:
    """Return the bar chart of the mean delta size in each bin of versions.

    Each bar is divided into the bytes of each table and the remaining bytes.
    """
    bins, tables = figures["bins"], figures["tables"]
    named = tables[:_NUM_SERIES]
    layers = {f"s{index}": table["bin_bytes"] for index, table in enumerate(named)}
    legend = {f"s{index}": short(table["name"]) for index, table in enumerate(named)}
    if len(tables) > len(named):
        layers["other"] = [sum(at) for at in zip(*(table["bin_bytes"] for table in tables[_NUM_SERIES:]), strict=True)]
        legend["other"] = _several(len(tables) - len(named), "other table")
    layers["rest"] = [
        max(0, each["delta_bytes"] - sum(layer[index] for layer in layers.values())) for index, each in enumerate(bins)
    ]
    legend["rest"] = "row ids, dense parameters, headers"
    means = {
        series: [total / (each["deltas"] or 1) for total, each in zip(layer, bins, strict=True)]
        for series, layer in layers.items()
    }
    scale = linear(max((sum(at) for at in zip(*means.values(), strict=True)), default=0.0))
    chart = axis.chart("Mean bytes of a delta, by table", legend)
    chart.y_ticks = scale.ticks(size)
    below = [0.0] * len(bins)
    for series, values in means.items():
        heights = [scale(value) for value in values]
        chart.shapes.append(Shape(bars(heights, below, _gap(len(bins)), axis.slots), series))
        below = [start + height for start, height in zip(below, heights, strict=True)]
    for index, (each, slot) in enumerate(zip(bins, axis.slots, strict=True)):
        at = tuple(size(layer[index]) for layer in means.values()) if each["deltas"] else ()
        title = f"{_version_title(each)} · {_contents(each)}"
        chart.hits.append(Hit(slot.left, slot.width, title, at))
    return chart


def _saved(bins: Sequence[dict[str, Any]], axis: _Axis) -> Chart:
    """Return the chart that compares the cumulative bytes of the stream with those of one full snapshot per version."""
    legend = {"full": "as full snapshots", "s0": "this stream"}
    chart = axis.chart("Cumulative bytes since the first version", legend)
    full = sent = 0
    curves: dict[str, list[tuple[float, float]]] = {"full": [], "s0": []}
    for each, slot in zip(bins, axis.slots, strict=True):
        curves["full"].append((slot.left, full))
        curves["s0"].append((slot.left, sent))
        full += each["full_bytes"]
        sent += each["delta_bytes"] + each["snapshot_bytes"]
        curves["full"].append((slot.right, full))
        curves["s0"].append((slot.right, sent))
        saved = f" · {share(1 - sent / full)} saved" if full else ""
        chart.hits.append(Hit(slot.left, slot.width, f"up to version {each['last']}{saved}", (size(full), size(sent))))
    scale = linear(max(full, sent))
    chart.y_ticks = scale.ticks(size)
    for series, points in curves.items():
        places = [(x, scale(y)) for x, y in points]
        chart.shapes += [Shape(line(places, is_area=True), series), Shape(line(places), series, is_line=True)]
    return chart


def _cadence(bins: Sequence[dict[str, Any]], axis: _Axis) -> Chart:
    """Return the chart of the longest and the mean time between consecutive versions, for each bin of versions."""
    chart = axis.chart("Time between versions", {"s0": "longest", "s1": "mean"})
    known = [each for each in bins if each["gap_seconds"] > 0]  # 0 is the time between contradicting clocks
    means = [each["gap_seconds"] / each["gaps"] if each["gaps"] else 0.0 for each in bins]
    scale = logarithmic([*(each["max_gap"] for each in known), *means])
    chart.y_ticks = scale.ticks(duration)
    if any(each["gaps"] > 1 for each in bins):
        above = [scale(each["max_gap"]) - scale(mean) for each, mean in zip(bins, means, strict=True)]
        chart.shapes.append(Shape(bars(above, [scale(mean) for mean in means], slots=axis.slots), "s0"))
    else:
        chart.legend = {"s1": "seconds since the previous version"}
    places: list[tuple[float, float]] = []
    before = 0.0
    for slot, each, mean in zip(axis.slots, bins, means, strict=True):
        if each["gap_seconds"] > 0:  # a step as long as the time that it shows
            places += [(before if places or axis.is_time else slot.left, scale(mean)), (slot.right, scale(mean))]
        before = slot.right
    if places:
        chart.shapes.append(Shape(line(places), "s1", is_line=True))
    for slot, each, mean in zip(axis.slots, bins, means, strict=True):
        values = (duration(each["max_gap"]), duration(mean)) if each["gap_seconds"] > 0 else ()
        chart.hits.append(Hit(slot.left, slot.width, _version_title(each), values[-len(chart.legend) :]))
    return chart


def _moved(figures: Figures) -> list[dict[str, Any]]:
    return [table for table in figures["tables"] if table["histogram"]][:_NUM_CARDS]


def _card(table: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables for one table: ``table`` itself, and ``chart``, the histogram of L2 distances."""
    histogram, moves = table["histogram"], table["moves"]
    scale = linear(max(bar["count"] for bar in histogram) / moves["count"])
    shares = [bar["count"] / moves["count"] for bar in histogram]
    chart = Chart(about="L2 distance", legend={"s0": "share of moves", "s1": "rows"})
    chart.shapes.append(Shape(bars([scale(each) for each in shares], gap=0.1), "s0"))
    chart.y_ticks = scale.ticks(share)
    across = Scale(histogram[0]["above"], histogram[-1]["to"], is_log=True)
    chart.x_ticks = _distances(across)
    chart.marks.append(Mark(across(moves["p50"]), "median"))
    slot = 100 / len(histogram)
    for index, (bar, each) in enumerate(zip(histogram, shares, strict=True)):
        title = f"moved by {number(bar['above'])} to {number(bar['to'])}"
        chart.hits.append(Hit(slot * index, slot, title, (share(each), count(bar["count"]))))
    return {"table": table, "chart": chart}


def _distances(across: Scale) -> list[Tick]:
    """Return at least two ticks for a scale of distances.

    Ticks are at powers of ten. If the scale contains fewer than two powers of ten, ticks are at 1, 2 and 5 times powers
    of ten. If it also contains fewer than two of these numbers, ticks are at the ends of the scale.
    """
    low, high = math.floor(math.log10(across.low)), math.ceil(math.log10(across.high))
    tens = [10.0**power for power in range(low, high + 1)]
    fine = [power * step for power in tens for step in (1, 2, 5)]
    for values in (tens[:: max(1, len(tens) // 6)], fine, [across.low, across.high]):
        inside = [value for value in values if across.low <= value <= across.high]
        if len(inside) > 1:
            break
    return [Tick(across(value), number(value)) for value in inside]


def _line(num_bytes: Sequence[int], figures: Figures) -> dict[str, str]:
    """Return the SVG path data and the label of a line chart of one table's mean bytes per delta in each bin.

    The horizontal axis is that of the other charts. Bins without deltas are omitted. The path is empty if fewer than
    two bins have deltas.

    Args:
        num_bytes: bytes of the table in the deltas of each bin.
        figures: data of the report.
    """
    bins = figures["bins"]
    if sum(1 for each in bins if each["deltas"]) < 2:  # noqa: PLR2004  ends of a line
        return {"path": "", "range": ""}
    axis = _Axis(figures)
    means = [
        (slot.middle, total / each["deltas"])
        for slot, total, each in zip(axis.slots, num_bytes, bins, strict=True)
        if each["deltas"]
    ]
    highest = max(mean for _, mean in means)
    scale = Scale(0.0, highest or 1.0)
    return {"path": line([(x, scale(mean)) for x, mean in means]), "range": f"0 to {size(highest)}"}


def _version_title(each: dict[str, Any]) -> str:
    first, last = each["first"], each["last"]
    if first == last:
        return f"version {first} · {moment(each['begin'])}"
    return f"versions {first} to {last} · {moment(each['begin'])} to {moment(each['end'], '%H:%M:%S')}"


def _contents(each: dict[str, Any]) -> str:
    found = []
    if each["deltas"]:
        whole = f", {size(each['delta_bytes'] / each['deltas'])} each on average" if each["deltas"] > 1 else ""
        found.append(f"{_several(each['deltas'], 'delta')} of {size(each['delta_bytes'])}{whole}")
    if each["snapshots"]:
        found.append(f"{_several(each['snapshots'], 'snapshot')} of {size(each['snapshot_bytes'])}")
    return " and ".join(found)


def _several(amount: int, one: str) -> str:
    return f"{count(amount)} {one}{'' if amount == 1 else 's'}"


def _across(num_cards: int) -> int:
    """Return the number of cards in a row of a wide page: the last row has at most one card less, if possible."""
    return num_cards if num_cards <= 4 else 4 if num_cards % 4 in (0, 3) else 3  # noqa: PLR2004  four fit


def _gap(num_bars: int) -> float:
    """Return the gap between bars as a fraction of a bar's slot; 0 for more than 60 bars."""
    return 0.15 if num_bars <= 60 else 0.0  # noqa: PLR2004  gaps are visible on a phone up to about 60 bars
