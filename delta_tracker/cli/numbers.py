"""Numbers on the command line."""

from __future__ import annotations

import click

_MAX = 1e9  # seconds that each kind of wait accepts


class Number(click.FloatRange):
    """Type of an option that takes a finite number, at most 1e9.

    Args:
        least: smallest number.
        most: largest number; None for 1e9.
        above: True if the number must be above ``least``.
    """

    def __init__(self, least: float, most: float | None = None, *, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number that a text is."""
        number = super().convert(value, param, ctx)
        if not number <= _MAX:  # NaN passes the comparisons of a range
            self.fail(f"{value} is not a number up to {_MAX:g}.", param, ctx)
        return number
