"""Charts of the report. Positions are percentages, and shapes are SVG paths in a view box of 1000 by 100 units.

The page stretches the SVG to the page's width. Text is not part of the SVG, because stretching distorts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 1000, 100
_MAX_TICKS = 5
_STEPS = (1, 2, 5, 10)
_MIN_SLOT = 0.2  # percent of the axis

Labels = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Labeled position on an axis.

    Args:
        place: position on the axis, in percent from the left or the bottom.
        label: text of the label.
        more: second line of the label, in smaller type; empty if the label has one line.
    """

    place: float
    label: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """Part of the horizontal axis that one bar takes, in percent from the left.

    Args:
        left: left edge.
        width: width.
    """

    left: float
    width: float

    @property
    def right(self) -> float:
        """Right edge."""
        return self.left + self.width

    @property
    def middle(self) -> float:
        """Middle between the edges."""
        return self.left + self.width / 2


@dataclass(slots=True, kw_only=True)
class Chart:
    """Chart of a report.

    Args:
        about: alternative text for screen readers.
        legend: mapping from the CSS class of each series to its label.
        slots: parts of the horizontal axis, from left to right.
        shapes: CSS classes and SVG path data of each shape, from back to front: the class of its series, which sets the
            color, and ``line`` for a path that is stroked instead of filled.
        y_ticks: labels of the vertical axis.
        x_ticks: labels of the horizontal axis.
        tips: title and values of the tooltip of each slot: one value per series, in the order of the legend, or none.
        marks: places of vertical lines in percent from the left, by their CSS class: ``snapshot``, ``restart`` or
            ``median``.
        axis: title of the horizontal axis; empty if it has none.
    """

    about: str
    legend: dict[str, str]
    slots: Sequence[Slot]
    shapes: list[tuple[str, str]] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    tips: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    marks: dict[str, list[float]] = field(default_factory=dict)
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear or logarithmic mapping from values to percent, 0 to 100.

    Args:
        low: value that is mapped to 0.
        high: value that is mapped to 100; must be above ``low``.
        is_log: True for a logarithmic scale, which requires that ``low`` is above 0.
    """

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the percentage for ``value``: 0 below ``low``, and 100 above ``high``."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return HEIGHT * math.log(value / self.low) / math.log(self.high / self.low)
        return HEIGHT * (value - self.low) / (self.high - self.low)

    def ticks(self, labels: Labels) -> list[Tick]:
        """Return ticks at a few round values. The function ``labels`` returns the label of a value."""
        return [Tick(round(self(value), 2), labels(value)) for value in self._round()]

    def _round(self) -> list[float]:
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1, -(-(last - first) // _MAX_TICKS) or 1)]
        step = _step(self.high - self.low)
        return [self.low + step * index for index in range(round((self.high - self.low) / step) + 1)]


def linear(highest: float) -> Scale:
    """Return a linear scale from 0 to the first round value at or above ``highest``.

    If ``highest`` is not positive, the scale ends at 1.

    Example:
        >>> linear(37.0)
        Scale(low=0.0, high=40.0, is_log=False)
    """
    if highest <= 0:
        return Scale(0.0, 1.0)
    step = _step(highest)
    return Scale(0.0, step * math.ceil(highest / step * (1 - 1e-9)))


def logarithmic(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale that covers all positive ``values``. It starts and ends at a power of ten."""
    above = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    return Scale(10.0**low, 10.0 ** max(high, low + 1), is_log=True)


def bars(
    slots: Sequence[Slot], heights: Sequence[float], below: Sequence[float] | None = None, gap: float = 0.0
) -> str:
    """Return the SVG path data of bars.

    Args:
        slots: slot of each bar.
        heights: height of each bar in percent. A bar of height 0 is not drawn.
        below: distance of each bar's lower edge from the bottom of the chart, in percent; None if all are 0.
        gap: gap between two bars, as a fraction of a bar's slot.
    """
    width = WIDTH / 100
    steps = []
    for slot, height, bottom in zip(slots, heights, below or [0.0] * len(slots), strict=True):
        if height > 0:
            left, across = width * (slot.left + slot.width * gap / 2), width * slot.width * (1 - gap)
            steps.append(
                f"M{_number(left)} {_number(HEIGHT - bottom)}v{_number(-height)}h{_number(across)}v{_number(height)}z"
            )
    return "".join(steps)


def line(places: Sequence[tuple[float, float]]) -> str:
    """Return the SVG path data of a line.

    Args:
        places: points of the line, at least one, in percent from the left and the bottom.
    """
    return "M" + "L".join(f"{_number(x * WIDTH / 100)} {_number(HEIGHT - y)}" for x, y in places)


def slots_of(spans: Sequence[tuple[float, float]], usual: float) -> list[Slot]:
    """Return slots at their places on an axis, such as times: each ends at the end of its span.

    A slot begins at the end of the one before it, but no more than ``usual`` before its own span. A longer time without
    a span thus remains empty. A slot takes at least 0.2 % of the axis.

    Args:
        spans: begin and end of each span, ascending.
        usual: usual distance of two spans.

    Example:
        >>> [(slot.left, slot.right) for slot in slots_of([(10.0, 10.0), (20.0, 20.0), (50.0, 50.0)], 10.0)]
        [(0.0, 20.0), (20.0, 40.0), (80.0, 100.0)]
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


def even_slots(count: int) -> list[Slot]:
    """Return ``count`` slots of equal width that fill the axis.

    Example:
        >>> even_slots(2)
        [Slot(left=0.0, width=50.0), Slot(left=50.0, width=50.0)]
    """
    return slots_of([(index, index) for index in range(count)], 1)


def _step(span: float) -> float:
    """Return the smallest number that is 1, 2 or 5 times a power of ten and at least ``span / _MAX_TICKS``."""
    rough = span / _MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in _STEPS if power * step >= rough * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
