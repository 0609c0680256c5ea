"""Output of a command: tables or JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.text import plain

_WIDTH_OF_FILES = 160


class _Console(Console):
    """Console that reports a closed pipe as an error, where rich ends the process with the exit code 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``, which :func:`~delta_tracker.cli.main.main` handles."""
        raise BrokenPipeError


class Output:
    """Writer of a command's result.

    Text is not interpreted as markup, and control characters are escaped.

    Args:
        is_json: option of the command: True to print one JSON object per line instead of text.
    """

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        # Files and pipes have no width.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILES
        self.console = _Console(highlight=False, markup=False, emoji=False, width=width)
        self._errors = _Console(highlight=False, markup=False, emoji=False, stderr=True)

    def json(self, value: dict[str, object]) -> None:
        """Print ``value`` as a JSON object on one line."""
        sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
        sys.stdout.flush()

    def line(self, text: object = "", style: str = "") -> None:
        """Print a line of text. ``style`` is a style name of the library ``rich``, such as ``bold``."""
        self.console.print(cell(text, style), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print a renderable of the library ``rich``. Escape its text with :func:`cell`."""
        self.console.print(renderable)

    def note(self, text: object) -> None:
        """Print a note on stderr."""
        self._errors.print(cell(text, "dim"), soft_wrap=True)

    @contextmanager
    def progress(self, doing: str, total: float | None) -> Iterator[Progressing]:
        """Show a progress bar on stderr during the ``with`` statement, if stderr is a terminal.

        Args:
            doing: description of the work.
            total: amount of work; None if unknown.

        Yields:
            Handle that advances the bar.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        is_shown = self._errors.is_terminal
        with Progress(*columns, console=self._errors, transient=True, disable=not is_shown) as bar:
            yield Progressing(bar, doing, total)


class Progressing:
    """Handle that advances a progress bar.

    Args:
        bar: display to which the progress bar is added.
        doing: description of the work.
        total: amount of work; None if unknown.
    """

    def __init__(self, bar: Progress, doing: str, total: float | None) -> None:
        self._bar = bar
        self._task = bar.add_task(plain(doing), total=total)

    def advance(self, amount: float = 1) -> None:
        """Advance the bar by ``amount``."""
        self._bar.advance(self._task, amount)


def cell(value: object, style: str = "") -> Text:
    """Return ``value`` as a :class:`rich.text.Text`. Escapes control characters; does not interpret markup."""
    return Text(plain(value), style=style)


def table(columns: Sequence[str], rows: Iterable[Sequence[object | Text]]) -> Table:
    """Return a :class:`rich.table.Table`. Only the first column wraps.

    Args:
        columns: column names. A column whose name begins with ``>`` is right-aligned, and the ``>`` is not shown.
        rows: cells of each row; a :class:`rich.text.Text` made by :func:`cell` keeps its style.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    for number, name in enumerate(columns):
        is_right = name.startswith(">")
        justify: Literal["left", "right"] = "right" if is_right else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=number > 0, overflow="fold")
    for row in rows:
        made.add_row(*(each if isinstance(each, Text) else cell(each) for each in row))
    return made
