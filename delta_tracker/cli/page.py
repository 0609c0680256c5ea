"""Render a report as one self-contained HTML file, which loads nothing from the network.

Names and errors from a stream are untrusted. The template escapes all of them. The content security policy of the page
allows only the page's own script, which sets text but never markup.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from delta_tracker.cli.charts import (
    Chart,
    Scale,
    Tick,
    bars,
    even_slots,
    line,
    linear,
    logarithmic,
    slots_of,
)
from delta_tracker.cli.text import count, duration, moment, plain, several, short, size

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_SCRIPT = Path(__file__).with_name("report.js")
_NUM_SERIES = 8
_NUM_CARDS = 12
_NUM_TICKS, _NUM_CARD_TICKS = 6, 4
_MAX_GAPS = 60  # gaps between bars are visible on a phone up to about 60 bars
_MINUTE, _DAY = 60.0, 86_400.0

Figures = dict[str, Any]
"""Data of a report as JSON values."""

_in_utc = partial(moment, zone=UTC)


def render(figures: Figures) -> str:
    """Return the HTML page of a report.

    Args:
        figures: data of the report, returned by :func:`delta_tracker.cli.report.gather`.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_harmless
    )
    environment.filters.update(count=count, size=size, duration=duration, number=number, share=share, short=short)
    environment.filters["moment"] = _in_utc
    script = _SCRIPT.read_text(encoding="utf-8")
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        figures=figures,
        charts=_over_time(figures),
        cards=[_card(table) for table in figures["tables"] if table["histogram"]][:_NUM_CARDS],
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


def _harmless(value: object) -> object:
    """Return a string with escaped control characters, and any other value unchanged.

    The template applies this to every value that it prints.
    """
    return plain(value) if type(value) is str else value


class _Axis:
    """Horizontal axis of the charts over the life of a stream: time.

    Args:
        bins: those of the figures of the report, at least one.
    """

    def __init__(self, bins: Sequence[dict[str, Any]]) -> None:
        self.bins = bins
        pauses = sorted(each["gap_seconds"] / each["gaps"] for each in bins if each["gaps"])
        usual = pauses[len(pauses) // 2] if pauses else _MINUTE
        self.slots = slots_of([(each["begin"], each["end"]) for each in bins], usual)
        self._low, self._high = bins[0]["begin"] - usual, bins[-1]["end"]

    def chart(self, about: str, legend: dict[str, str]) -> Chart:
        """Return a chart with this axis, to which the caller adds bars or lines.

        Marks show snapshots and publisher restarts. Ticks show the time and the newest version then.
        """
        spans = list(zip(self.bins, self.slots, strict=True))
        marks = {
            "snapshot": [slot.middle for each, slot in spans if each["snapshots"]],
            "restart": [slot.left for each, slot in spans if each["restarts"]],
        }
        low, seconds = self._low, self._high - self._low
        form = "%H:%M:%S" if seconds < _NUM_TICKS * _MINUTE else "%H:%M"
        if _in_utc(low, "%Y-%m-%d") != _in_utc(self._high, "%Y-%m-%d"):
            form = "%Y-%m-%d" if seconds > _NUM_TICKS * _DAY else f"%m-%d {form}"
        ticks = []
        for place in _places(_NUM_TICKS):
            time = low + seconds * place / 100
            past = [each["last"] for each in self.bins if each["end"] <= time]
            ticks.append(Tick(place, _in_utc(time, form), f"v{past[-1]}" if past else ""))
        axis = "time (UTC), and the newest version then"
        return Chart(about=about, legend=legend, slots=self.slots, marks=marks, x_ticks=ticks, axis=axis)


def _over_time(figures: Figures) -> dict[str, Chart]:
    """Return the charts over the life of the stream; none for a stream without versions."""
    if not figures["bins"]:
        return {}
    axis = _Axis(figures["bins"])
    return {"sizes": _sizes(figures, axis), "cadence": _cadence(axis)}


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
        legend["other"] = several(len(tables) - len(named), "other table")
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
    gap = 0.15 if len(bins) <= _MAX_GAPS else 0.0
    for series, values in means.items():
        heights = [scale(value) for value in values]
        chart.shapes.append((series, bars(axis.slots, heights, below, gap)))
        below = [start + height for start, height in zip(below, heights, strict=True)]
    for index, each in enumerate(bins):
        values = [size(layer[index]) for layer in means.values()] if each["deltas"] else []
        chart.tips.append((f"{_version_title(each)} · {_contents(each)}", values))
    return chart


def _cadence(axis: _Axis) -> Chart:
    """Return the chart of the longest and the mean time between consecutive versions, for each bin of versions."""
    bins = axis.bins
    chart = axis.chart("Time between versions", {"s0": "longest", "s1": "mean"})
    longest = [each["max_gap"] for each in bins]
    means = [each["gap_seconds"] / (each["gaps"] or 1) for each in bins]
    scale = logarithmic([*longest, *means])
    chart.y_ticks = scale.ticks(duration)
    if any(each["gaps"] > 1 for each in bins):
        above = [scale(most) - scale(mean) for most, mean in zip(longest, means, strict=True)]
        chart.shapes.append(("s0", bars(axis.slots, above, [scale(mean) for mean in means])))
    else:
        chart.legend = {"s1": "seconds since the previous version"}
    places: list[tuple[float, float]] = []
    before = 0.0
    for slot, each, most, mean in zip(axis.slots, bins, longest, means, strict=True):
        values: tuple[str, ...] = ()
        if mean > 0:  # a step as long as the time that it shows
            places += [(before, scale(mean)), (slot.right, scale(mean))]
            values = (duration(most), duration(mean))[-len(chart.legend) :]
        chart.tips.append((_version_title(each), values))
        before = slot.right
    if places:
        chart.shapes.append(("s1 line", line(places)))
    return chart


def _card(table: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables for one table: ``table`` itself, and ``chart``, the histogram of L2 distances."""
    histogram, moves = table["histogram"], table["moves"]
    slots, shares = even_slots(len(histogram)), [bar["count"] / moves["count"] for bar in histogram]
    scale = linear(max(shares))
    chart = Chart(about="L2 distance", legend={"s0": "share of moves", "s1": "rows"}, slots=slots)
    chart.y_ticks = scale.ticks(share)
    chart.shapes.append(("s0", bars(slots, [scale(each) for each in shares], gap=0.1)))
    across = Scale(histogram[0]["above"], histogram[-1]["to"], is_log=True)
    for place in _places(_NUM_CARD_TICKS):
        chart.x_ticks.append(Tick(place, number(across.low * (across.high / across.low) ** (place / 100))))
    chart.marks["median"] = [across(moves["p50"])]
    for bar, each in zip(histogram, shares, strict=True):
        title = f"moved by {number(bar['above'])} to {number(bar['to'])}"
        chart.tips.append((title, (share(each), count(bar["count"]))))
    return {"table": table, "chart": chart}


def _places(count: int) -> list[float]:
    """Return places of ticks at equal distances, in percent."""
    return [100 * index / (count - 1) for index in range(count)]


def _version_title(each: dict[str, Any]) -> str:
    first, last = each["first"], each["last"]
    if first == last:
        return f"version {first} · {_in_utc(each['begin'])}"
    return f"versions {first} to {last} · {_in_utc(each['begin'])} to {_in_utc(each['end'], '%H:%M:%S')}"


def _contents(each: dict[str, Any]) -> str:
    found = []
    if each["deltas"]:
        whole = f", {size(each['delta_bytes'] / each['deltas'])} each on average" if each["deltas"] > 1 else ""
        found.append(f"{several(each['deltas'], 'delta')} of {size(each['delta_bytes'])}{whole}")
    if each["snapshots"]:
        found.append(f"{several(each['snapshots'], 'snapshot')} of {size(each['snapshot_bytes'])}")
    return " and ".join(found)


def _across(num_cards: int) -> int:
    """Return the number of cards in a row of a wide page: the last row has at most one card less, if possible."""
    return num_cards if num_cards <= 4 else 4 if num_cards % 4 in (0, 3) else 3  # noqa: PLR2004  four fit
