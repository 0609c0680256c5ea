"""Charts as numbers and SVG paths, in a box of 1000 by 100 that the page stretches; text stands beside it.

So one drawing serves a phone and a wide screen, and letters are never stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 1000, 100
_MAX_TICKS = 5
_STEPS = (1, 2, 5, 10)

Labels = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a place along an axis, in percent from the left or the bottom; ``more`` is set below it, smaller."""

    place: float
    label: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A path in the colour ``series``: filled, or a line."""

    path: str
    series: str
    is_line: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """What the pointer finds between ``left`` and ``left + width`` (percent): a title, and a value for each series."""

    left: float
    width: float
    title: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a place in percent, of a kind that the page knows how to draw."""

    place: float
    kind: str


@dataclass(slots=True, kw_only=True)
class Chart:
    """A drawing.

    Args:
        about: what it shows, for who cannot see it.
        legend: series to name, in the order of the values of the hits.
        shapes: from the back to the front.
        y_ticks: of the vertical axis.
        x_ticks: of the horizontal axis.
        hits: from left to right.
        marks: vertical lines.
    """

    about: str
    legend: dict[str, str]
    shapes: list[Shape] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places between 0 and 100.

    Args:
        low: the value at 0.
        high: the value at 100, above ``low``.
        is_log: by their logarithms; both are above 0 then.
    """

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; those beyond the ends stand at the ends."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return HEIGHT * math.log(value / self.low) / math.log(self.high / self.low)
        return HEIGHT * (value - self.low) / (self.high - self.low)

    def ticks(self, labels: Labels) -> list[Tick]:
        """A few round values."""
        return [Tick(round(self(value), 2), labels(value)) for value in self._round()]

    def _round(self) -> list[float]:
        if self.is_log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1, -(-(last - first) // _MAX_TICKS) or 1)]
        step = _step(self.high - self.low)
        return [self.low + step * index for index in range(round((self.high - self.low) / step) + 1)]


def linear(highest: float) -> Scale:
    """From 0 to a round value that is not below ``highest``.

    Example:
        >>> linear(37.0)
        Scale(low=0.0, high=40.0, is_log=False)
    """
    if highest <= 0:
        return Scale(0.0, 1.0)
    step = _step(highest)
    return Scale(0.0, step * math.ceil(highest / step * (1 - 1e-9)))


def logarithmic(values: Sequence[float]) -> Scale:
    """Between powers of ten around those of ``values`` that are above 0."""
    above = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    return Scale(10.0**low, 10.0 ** max(high, low + 1), is_log=True)


def bars(heights: Sequence[float], below: Sequence[float] | None = None, gap: float = 0.0) -> str:
    """The path of bars side by side over the whole width.

    Args:
        heights: in percent.
        below: where each begins, in percent; on the ground if not given.
        gap: between two bars, as a share of a bar's place.
    """
    slot = WIDTH / max(1, len(heights))
    steps = []
    for index, height in enumerate(heights):
        if height > 0:
            bottom = 0.0 if below is None else below[index]
            left = slot * (index + gap / 2)
            steps.append(
                f"M{_number(left)} {_number(HEIGHT - bottom)}v{_number(-height)}h{_number(slot * (1 - gap))}"
                f"v{_number(height)}z"
            )
    return "".join(steps)


def line(places: Sequence[tuple[float, float]], *, is_area: bool = False) -> str:
    """The path through points, in percent from the left and the bottom; or of the area under it."""
    points = "L".join(f"{_number(x * WIDTH / 100)} {_number(HEIGHT - y)}" for x, y in places)
    if not is_area:
        return f"M{points}"
    left, right = (_number(places[end][0] * WIDTH / 100) for end in (0, -1))
    return f"M{left} {HEIGHT}L{points}L{right} {HEIGHT}z"


def spread(count: int, most: int) -> list[int]:
    """Which of ``count`` places side by side get a label, if ``most`` of them fit."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _step(span: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that has at most so many steps in a span."""
    rough = span / _MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in _STEPS if power * step >= rough * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
