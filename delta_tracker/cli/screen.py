"""Screen of the command ``top``. On a small terminal, only the most important rows are shown."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.attention import clock_notices, predictor_notices, silence_notices, sort_notices
from delta_tracker.cli.listings import PREDICTOR_COLUMNS, SIGNS, no_data_text, predictor_cells, version_table
from delta_tracker.cli.output import cell, one_line, table
from delta_tracker.cli.predictors import SeenPredictor
from delta_tracker.cli.text import count, duration, format_time, short, size
from delta_tracker.cli.watch import TopView

_FIXED_LINES = 10  # three lines of the head, three headings, three blank lines, the last line
_UNLIMITED = 60
_WIDE = 110  # characters, from which hosts are shown


def screen(view: TopView, width: int, height: int | None = None) -> RenderableType:
    """Return the screen as a renderable of ``rich``.

    ``width`` is the width of the terminal in characters. ``height`` is its height in lines; None if it is unlimited.
    """
    notices, newest = _notices(view, height), view.watch.newest(height or _UNLIMITED)
    wanted = [max(1, len(view.predictors)), len(view.watch.amounts(view.read)), len(newest)]
    num_predictors, num_tables, num_versions = _shares((height or _UNLIMITED) - _FIXED_LINES - len(notices), wanted)
    found: list[RenderableType] = [
        *_head(view),
        Text(),
        _predictors(view, num_predictors, width),
        Text(),
        _tables(view, num_tables, width),
        Text(),
        version_table(newest[:num_versions], view.now, is_cut=True),
        *notices,
    ]
    return Group(*found) if height is None else Group(*found, one_line("Ctrl-C quits", "dim"))


def _notices(view: TopView, height: int | None) -> list[Text]:
    """Return the lines that show the last problem and the notices with their next steps; fewer on a small terminal."""
    times = [entry.committed for entry in view.watch.entries if entry.kind != "claim"]
    gaps = [after - before for before, after in pairwise(times)]
    silence = silence_notices(view.now - view.head.committed, len(gaps), max(gaps, default=0.0))
    found = sort_notices([*silence, *predictor_notices(view.predictors), *clock_notices(view.skews)])
    made = [] if view.problem is None else [one_line(f"✕ {view.problem}", "bold red")]
    most = _UNLIMITED if height is None else 1 if height < 20 else 4 if height < 30 else 8  # noqa: PLR2004
    with_steps = most > 1
    num_shown = max(0, min(len(found), (most - len(made)) // (1 + with_steps)))
    for number, each in enumerate(found[:num_shown], start=1):
        sign, style = SIGNS[each.level]
        place = f"({number} of {len(found)}) " if num_shown < len(found) else ""
        made.append(one_line(f"{sign}{place}{each.what}", style))
        if with_steps:
            made.append(one_line(f"  next step: {each.next_step}"))
    return made


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Distribute ``room`` lines evenly among tables. Return the number of lines of each table.

    ``wanted`` contains the number of lines that each table needs. A table that needs lines gets at least one, even if
    ``room`` is less than the number of tables.
    """
    given = [min(1, want) for want in wanted]
    while sum(given) < room and given != list(wanted):
        for index, want in enumerate(wanted):
            if given[index] < want and sum(given) < room:
                given[index] += 1
    return given


def _head(view: TopView) -> list[RenderableType]:
    watch, head = view.watch, view.head
    title = one_line("delta-tracker top  ", "bold")
    title.append_text(cell(view.url))
    state = one_line("")
    state.append_text(cell(f"version {head.version}", "bold"))
    state.append(f" {head.kind}, {duration(max(0.0, view.now - head.committed))} old  generation {head.generation}")
    state.append(f"  pending {count(head.pending_rows)}")
    beats = [each.beat for each in view.predictors]
    resyncs, errors = sum(beat.resyncs for beat in beats), sum(beat.error is not None for beat in beats)
    state.append(f"  resyncs {count(resyncs)}  errors {count(errors)}")
    versions, rows, num_bytes = view.rates()
    rate = one_line("")
    for value, unit in ((_rate(versions), " versions/s  "), (_rate(rows), " rows/s  "), (size(num_bytes), "/s  ")):
        rate.append(value, "bold").append(unit)
    rate.append(f"over {duration(watch.seconds(view.read))}")
    if view.now > view.read:
        rate.append(f"  ! no data since {format_time(view.read)}", "bold yellow")
    return [title, state, rate]


def _predictors(view: TopView, lines: int, width: int) -> Table:
    heading = f"predictor{_rest(len(view.predictors) - lines, view.num_gone)}"
    if not view.predictors:
        return table((heading,), [("none has left a heartbeat in the last hour",)], is_cut=True)
    columns = (heading, *PREDICTOR_COLUMNS[1:], "error")
    rows = [(*predictor_cells(each), one_line(_error(each, view.now))) for each in view.predictors[:lines]]
    places = [place for place, name in enumerate(columns) if name != "host" or width >= _WIDE]
    return table([columns[place] for place in places], ([row[place] for place in places] for row in rows), is_cut=True)


def _error(predictor: SeenPredictor, now: float) -> str:
    return no_data_text(predictor, now) if predictor.is_silent else predictor.beat.error or ""


def _tables(view: TopView, lines: int, width: int) -> Table:
    """Return a table of the update rates of the embedding tables, sorted by bytes in descending order."""
    watch, seconds = view.watch, view.watch.seconds(view.read)
    amounts = sorted(watch.amounts(view.read).items(), key=lambda each: (-each[1].num_bytes, each[0]))
    rows = []
    for fqn, amount in amounts[:lines]:
        last, spec = watch.changed.get(fqn), watch.tables.get(fqn)
        rows.append(
            (
                short(fqn, max(20, width - 50)),
                "?" if spec is None else f"{count(spec.num_rows)} x {spec.dim}",
                _rate(amount.rows / seconds),
                size(amount.num_bytes / seconds),
                "none" if last is None else duration(max(0.0, view.now - last.committed)),
            )
        )
    heading = f"table{_rest(len(amounts) - lines)}"
    return table((heading, ">rows x columns", ">rows/s", ">bytes/s", ">last change"), rows, is_cut=True)


def _rest(num_left: int, num_gone: int = 0) -> str:
    """Return the end of a heading: the number of hidden rows or, if it is 0, the number of predictors that are gone."""
    if num_left > 0:
        return f" (and {count(num_left)} more)"
    return f" (and {count(num_gone)} gone)" if num_gone else ""


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"  # noqa: PLR2004
