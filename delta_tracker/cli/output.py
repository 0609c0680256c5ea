"""Output of a command: tables or JSON on stdout, notes and progress on stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from msgspec import to_builtins
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.text import escaped

_WIDTH_OF_FILES = 160


class _Console(Console):
    """Console that raises BrokenPipeError if the pipe is closed. Its base class would exit with code 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``, which :func:`~delta_tracker.cli.main.main` handles."""
        raise BrokenPipeError


class Output:
    """Writer for the results of a command, as text or as JSON objects.

    Text is not interpreted as markup, and control characters are escaped.

    Args:
        is_json: True if the option ``--json`` was passed. Results are then printed as JSON, otherwise as text.
    """

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        # Files and pipes have no width.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILES
        self.console = _Console(highlight=False, markup=False, emoji=False, width=width)
        self._errors = _Console(highlight=False, markup=False, emoji=False, stderr=True)

    def result(self, value: object, text: str, style: str = "") -> None:
        """Print a result. With ``--json``, print ``value`` as JSON, otherwise print ``text``."""
        self.json(value)
        self.line(text, style)

    def json(self, value: object) -> None:
        """Print a dict, a dataclass or a msgspec Struct as a JSON object on one line. No-op without ``--json``.

        NaN and infinity are printed as null.
        """
        if self.is_json:
            finite = json.loads(json.dumps(to_builtins(value)), parse_constant=lambda _: None)
            sys.stdout.write(json.dumps(finite) + "\n")
            sys.stdout.flush()

    def line(self, text: object = "", style: str = "") -> None:
        """Print a line of text. ``style`` is a style of ``rich``, such as ``"bold red"``. No-op with ``--json``."""
        if not self.is_json:
            self.console.print(cell(text, style), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print a renderable of ``rich``. Its text must be escaped with :func:`cell`. No-op with ``--json``."""
        if not self.is_json:
            self.console.print(renderable)

    def note(self, text: object) -> None:
        """Print a line of text on stderr, even with ``--json``."""
        self._errors.print(cell(text, "dim"), soft_wrap=True)

    @contextmanager
    def progress(self, doing: str, total: float | None) -> Iterator[Callable[..., None]]:
        """Show a progress bar on stderr during the ``with`` statement, if stderr is a terminal.

        ``doing`` is the label of the bar. ``total`` is the amount of work; None if unknown. The yielded function
        advances the bar by its argument, by default 1.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        is_shown = self._errors.is_terminal
        with Progress(*columns, console=self._errors, transient=True, disable=not is_shown) as bar:
            yield partial(bar.advance, bar.add_task(escaped(doing), total=total))


def cell(value: object, style: str = "") -> Text:
    """Return ``value`` as a :class:`rich.text.Text`, with control characters escaped and markup not interpreted."""
    return Text(escaped(value), style=style)


def one_line(text: object, style: str = "") -> Text:
    """Return ``text`` like :func:`cell`, but truncate it instead of wrapping it if the terminal is too narrow."""
    made = cell(text, style)
    made.no_wrap, made.overflow = True, "ellipsis"
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, is_cut: bool = False) -> Table:
    """Return a :class:`rich.table.Table` of ``rows``.

    Args:
        columns: column names. A leading ``>`` is removed and makes the column right-aligned.
        rows: cells of each row. A cell may be any value. If it is a result of :func:`cell`, its style is kept.
        is_cut: False to wrap the first column if the table is too wide for the terminal. True to truncate columns
            instead, beginning with the last one, so that each row takes one line.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    as_cell = one_line if is_cut else cell
    yielding = len(columns) - 1 if is_cut else 0  # number of the column that is narrowed first
    for number, name in enumerate(columns):
        made.add_column(
            as_cell(name.removeprefix(">")),
            justify="right" if name.startswith(">") else "left",
            no_wrap=number != yielding,
            overflow="ellipsis" if is_cut else "fold",
        )
    for row in rows:
        made.add_row(*(each if isinstance(each, Text) else as_cell(each) for each in row))
    return made


def facts(lines: Mapping[str, str]) -> Table:
    """Return a :class:`rich.table.Table` of the names and values in ``lines``, without headings."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, line in lines.items():
        made.add_row(name, cell(line))
    return made
