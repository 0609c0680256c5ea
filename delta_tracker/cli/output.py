"""What a command shows: tables for people or JSON for machines on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.text import plain

_WIDTH_OF_FILES = 160


class Output:
    """Where a command's result goes.

    All text is shown as it is: what looks like markup is no markup, and what a terminal would obey is escaped.

    Args:
        is_json: one JSON object a line instead of tables.
    """

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        # A file, or the next command of a pipe, has no width.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILES
        self.console = Console(highlight=False, markup=False, emoji=False, width=width)
        self._errors = Console(highlight=False, markup=False, emoji=False, stderr=True)

    def json(self, value: dict[str, object]) -> None:
        """Print one object on one line."""
        sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
        sys.stdout.flush()

    def line(self, text: object = "", style: str = "") -> None:
        """Print a line for people."""
        self.console.print(cell(text, style), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print anything of rich's whose text has gone through :func:`cell`."""
        self.console.print(renderable)

    def note(self, text: object) -> None:
        """Say something beside the result, on stderr."""
        self._errors.print(cell(text, "dim"), soft_wrap=True)

    @contextmanager
    def progress(self, doing: str, total: float | None) -> Iterator[Progressing]:
        """A bar on stderr while the block runs; nothing where that is no terminal.

        Args:
            doing: what is being done.
            total: how much there is of it; None if nobody knows.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        is_shown = self._errors.is_terminal
        with Progress(*columns, console=self._errors, transient=True, disable=not is_shown) as bar:
            yield Progressing(bar, doing, total)


class Progressing:
    """A bar that is on its way."""

    def __init__(self, bar: Progress, doing: str, total: float | None) -> None:
        self._bar = bar
        self._task = bar.add_task(plain(doing), total=total)

    def advance(self, amount: float = 1) -> None:
        """So much more of it is done."""
        self._bar.advance(self._task, amount)


def cell(value: object, style: str = "") -> Text:
    """Text that shows exactly what it says."""
    return Text(plain(value), style=style)


def table(columns: Sequence[str], rows: Iterable[Sequence[object | Text]]) -> Table:
    """A table. A column whose name begins with ``>`` is set to the right. Only the first one is folded if need be.

    Args:
        columns: their heads.
        rows: the cells; a :class:`rich.text.Text` made by :func:`cell` keeps its style.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    for number, name in enumerate(columns):
        is_right = name.startswith(">")
        justify: Literal["left", "right"] = "right" if is_right else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=number > 0, overflow="fold")
    for row in rows:
        made.add_row(*(each if isinstance(each, Text) else cell(each) for each in row))
    return made
