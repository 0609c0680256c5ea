"""Screen of the command ``top``. If the screen does not fit the terminal, it shows only the most important rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.attention import LEVELS, Level, level_of, of_clocks, of_predictors, sort_notices
from delta_tracker.cli.entries import Entry
from delta_tracker.cli.followers import FollowerView
from delta_tracker.cli.output import cell
from delta_tracker.cli.text import count, duration, moment, size
from delta_tracker.cli.watch import View
from delta_tracker.stream.fleet import State

_T = TypeVar("_T")

Section = Literal["all", "predictors", "tables", "versions"]

SECTIONS: dict[str, Section] = {"a": "all", "p": "predictors", "t": "tables", "v": "versions"}
KEYS = "q quit  space refresh  p predictors  t tables  v versions  a all"
_FIXED_LINES = 11  # four lines of the head, three headings, three blank lines, one for the keys
_LEAST, _UNLIMITED = 3, 60
_WIDE = 110  # characters, from which hosts are shown
_SPARKS = " ▁▂▃▄▅▆▇█"
_LEVELS: dict[Level, tuple[str, str]] = {"fault": ("✕ ", "bold red"), "warning": ("! ", "yellow"), "note": ("i ", "")}


def screen(
    view: View, width: int, height: int | None = None, *, section: Section = "all", hint: str = ""
) -> RenderableType:
    """Return the screen as a rich renderable.

    Args:
        view: data to show.
        width: width of the terminal in characters.
        height: height of the terminal in lines; None for no limit.
        section: the table to show; ``all`` to divide the lines among the three tables.
        hint: last line of the screen; empty for none.
    """
    tables, versions = _tables(view, width), view.watch.newest(height or _UNLIMITED)
    notices = _notices(view, height)
    num_tables = 3 if section == "all" else 1
    room = (height or _UNLIMITED) - _FIXED_LINES + 2 * (3 - num_tables) - len(notices)
    wanted = {"predictors": max(1, len(view.followers)), "tables": len(tables), "versions": len(versions)}
    shown = list(wanted) if section == "all" else [section]
    lines = dict(zip(shown, _shares(room, [wanted[name] for name in shown]), strict=True))
    found: list[RenderableType] = [*_head(view, width), Text()]
    if "predictors" in lines:
        found += [_predictors(view, lines["predictors"], width), Text()]
    if "tables" in lines:
        found += [_table_of_tables(tables, lines["tables"]), Text()]
    if "versions" in lines:
        found.append(_versions(versions[: lines["versions"]], view.now))
    found += notices
    if hint:
        found.append(_one_line(hint, "dim"))
    return Group(*found)


def _notices(view: View, height: int | None) -> list[Text]:
    """Return the lines that say what needs attention, and what to do next. A low terminal has fewer of them."""
    found = sort_notices([*of_predictors(view.followers), *of_clocks(view.skews)])
    made = [] if view.problem is None else [_one_line(f"✕ {view.problem}", "bold red")]
    most = _UNLIMITED if height is None else 1 if height < 20 else 4 if height < 30 else 8  # noqa: PLR2004
    with_steps = most > 1
    num_shown = max(0, min(len(found), (most - len(made)) // (1 + with_steps)))
    for number, each in enumerate(found[:num_shown], start=1):
        sign, style = _LEVELS[each.level]
        place = f"({number} of {len(found)}) " if num_shown < len(found) else ""
        made.append(_one_line(f"{sign}{place}{each.what}", style))
        if with_steps:
            made.append(_one_line(f"  next step: {each.next_step}"))
    return made


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Distribute lines of the screen among its tables.

    Each table first gets up to three lines. The remaining lines are given in turn to the tables that need more.

    Args:
        room: number of lines to distribute.
        wanted: number of lines that each table needs.

    Returns:
        The number of lines for each table.
    """
    least = max(1, min(_LEAST, room // len(wanted)))
    given = [min(least, want) for want in wanted]
    while sum(given) < room and given != list(wanted):
        for index, want in enumerate(wanted):
            if given[index] < want and sum(given) < room:
                given[index] += 1
    return given


def _head(view: View, width: int) -> list[Text]:
    watch, now, head = view.watch, view.read, view.watch.head
    title = _one_line("delta-tracker top  ", "bold")
    title.append_text(cell(view.url))
    if head is None:
        return [title, _one_line("✕ the stream no longer exists", "bold red"), Text(), Text()]
    state = _one_line("")
    state.append_text(cell(f"version {head.version}", "bold"))
    state.append(f" {head.kind}, {duration(max(0.0, view.now - head.committed))} old  generation {head.generation}")
    state.append(f"  pending {count(head.pending_rows)}")
    resyncs, held = sum(each.beat.resyncs for each in view.followers), sum(_is_held(each) for each in view.followers)
    state.append(f"  resyncs {count(resyncs)}  errors {count(held)}")
    recent, seconds = watch.recent(now), watch.seconds(now)
    rows, num_bytes = sum(entry.num_rows for entry in recent), sum(entry.num_bytes for entry in recent)
    rate = _one_line("")
    for value, unit in (
        (_rate(len(recent) / seconds), " versions/s  "),
        (_rate(rows / seconds), " rows/s  "),
        (size(num_bytes / seconds), "/s  "),
    ):
        rate.append(value, "bold").append(unit)
    rate.append(f"over {duration(seconds)}")
    if view.now > now:
        rate.append(f"  ! no data since {moment(now)}", "bold yellow")
    return [title, state, rate, _pulse(view, width)]


def _pulse(view: View, width: int) -> Text:
    """Return a line of bars: the bytes of deltas in equal intervals, with their length and the largest value."""
    watch, now = view.watch, view.read
    num_bars = max(8, min(60, width - 44))
    values = watch.pulse(now, num_bars)
    made = _one_line(f"delta bytes per {duration(watch.seconds(now) / num_bars)}")
    return made.append(f", 0 to {size(max(values))} │{_spark(values)}│ now" if any(values) else ": none")


def _predictors(view: View, lines: int, width: int) -> Table:
    is_wide = width >= _WIDE
    hosts = ("host",) if is_wide else ()
    if not view.followers:
        made = _table("predictor")
        _fitting(made, [], lines, view.num_gone)
        made.add_row(cell("none has left a heartbeat in the last hour"))
        return made
    made = _table("predictor", "state", *hosts, ">heartbeat", ">version", ">behind", ">for", ">resyncs", "error")
    ranked = sorted(view.followers, key=_urgency, reverse=True)
    for each in _fitting(made, ranked, lines, view.num_gone):
        beat, state = each.beat, _state(each)
        level = level_of(state)
        sign, style = ("", "") if level == "note" else _LEVELS[level]
        error = _one_line(beat.error or "")
        if state == "silent":  # what it wrote last is not what is now
            figures = ["-", "-", "-", "-"]
            last = "" if beat.version is None else f" at version {beat.version}"
            error = _one_line(f"no data since {moment(view.now - each.seconds_ago)}{last}")
        else:
            figures = [
                "none" if beat.version is None else str(beat.version),
                "?" if each.behind is None else count(each.behind),
                "-" if not each.behind else "?" if beat.lag_seconds is None else duration(beat.lag_seconds),
                count(beat.resyncs),
            ]
        host = [cell(beat.host or "unknown")] if is_wide else []
        made.add_row(
            cell(beat.name),
            cell(sign + state, style),
            *host,
            cell(duration(each.seconds_ago)),
            *map(cell, figures),
            error,
        )
    return made


def _state(follower: FollowerView) -> State:
    return "silent" if follower.state == "silent" else follower.health


def _tables(view: View, width: int) -> list[tuple[Text, ...]]:
    """Return one row of cells for each table of the stream, sorted by bytes in descending order."""
    watch, seconds = view.watch, view.watch.seconds(view.read)
    amounts = sorted(watch.amounts(view.read).items(), key=lambda each: (-each[1].num_bytes, each[0]))
    found: list[tuple[Text, ...]] = []
    for fqn, amount in amounts:
        last, spec = watch.changed.get(fqn), watch.tables.get(fqn)
        found.append(
            (
                cell(_short(fqn, max(20, width - 50))),
                cell("?" if spec is None else f"{count(spec.num_rows)} x {spec.dim}"),
                cell(_rate(amount.rows / seconds)),
                cell(size(amount.num_bytes / seconds)),
                cell("none" if last is None else duration(max(0.0, view.now - last.committed))),
            )
        )
    return found


def _table_of_tables(rows: list[tuple[Text, ...]], lines: int) -> Table:
    made = _table("table", ">rows x columns", ">rows/s", ">bytes/s", ">last change")
    for row in _fitting(made, rows, lines):
        made.add_row(*row)
    return made


def _versions(entries: Sequence[Entry], now: float) -> Table:
    has_owners = any(entry.owners for entry in entries)
    names = (">version", "kind", ">age", ">rows", ">bytes", ">tables", ">pending", ">cut to commit")
    made = _table(*names, *([">ids in / out"] if has_owners else []))
    for entry in entries:
        delay = f"{duration(entry.created - entry.cut)}" if 0 < entry.cut <= entry.created else ""
        made.add_row(
            cell(entry.version),
            cell(entry.kind),
            cell(duration(max(0.0, now - entry.committed))),
            cell(count(entry.num_rows)),
            cell(size(entry.num_bytes)),
            cell(len(entry.tables)),
            cell(count(entry.pending_rows)),
            cell(delay),
            *([cell(entry.owner_changes)] if has_owners else []),
        )
    return made


def _fitting(made: Table, rows: Sequence[_T], lines: int, num_gone: int = 0) -> Sequence[_T]:
    """Return the first ``lines`` rows, and add the number of omitted rows to the heading of the first column.

    Args:
        made: rich table in which the rows will be shown; the heading of its first column is modified.
        rows: all rows.
        lines: maximum number of rows.
        num_gone: number of predictors without a heartbeat in the last hour, shown in the heading if no row is omitted.
    """
    left = len(rows) - lines
    if left > 0:
        made.columns[0].header = _one_line(f"{made.columns[0].header} (and {count(left)} more)")
    elif num_gone:
        made.columns[0].header = _one_line(f"{made.columns[0].header} (and {count(num_gone)} gone)")
    return rows[:lines]


def _table(*columns: str) -> Table:
    """Return an empty rich table. If it is too wide for the terminal, its last column is narrowed first.

    Args:
        columns: column names. A column whose name begins with ``>`` is right-aligned, and the ``>`` is not shown.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold underline")
    for name in columns:
        made.add_column(
            _one_line(name.removeprefix(">")),
            justify="right" if name.startswith(">") else "left",
            no_wrap=name != columns[-1],
            overflow="ellipsis",
        )
    return made


def _urgency(follower: FollowerView) -> tuple[bool, int, float]:
    return _is_held(follower), -LEVELS.index(level_of(_state(follower))), follower.behind or 0


def _is_held(follower: FollowerView) -> bool:
    return follower.beat.error is not None


def _one_line(text: str, style: str = "") -> Text:
    made = cell(text, style)
    made.no_wrap, made.overflow = True, "ellipsis"
    return made


def _short(name: str, width: int) -> str:
    """Return ``name``. If it is longer than ``width``, return an ellipsis and the last ``width - 1`` characters."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"  # noqa: PLR2004


def _spark(values: Sequence[int]) -> str:
    highest = max(values, default=0) or 1
    return "".join(_SPARKS[-(-value * (len(_SPARKS) - 1) // highest)] for value in values)
