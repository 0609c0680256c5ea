"""Screen of the command ``top``. If the screen does not fit the terminal, it shows only the most important rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delta_tracker.cli.entries import Entry
from delta_tracker.cli.followers import FollowerView
from delta_tracker.cli.output import cell
from delta_tracker.cli.text import count, duration, size
from delta_tracker.cli.watch import View

_T = TypeVar("_T")

_FIXED_LINES = 10  # three lines of the head, three headings, three blank lines, one for a problem
_LEAST, _UNLIMITED = 3, 60
_SPARKS = " ▁▂▃▄▅▆▇█"
_KINDS = {"snapshot": "cyan", "claim": "yellow"}


def screen(view: View, width: int, height: int | None = None) -> RenderableType:
    """Return the screen as a rich renderable.

    Args:
        view: data to show.
        width: width of the terminal in characters.
        height: height of the terminal in lines; None for no limit.
    """
    tables, versions = _tables(view, width), view.watch.newest(_UNLIMITED)
    room = (height or _UNLIMITED) - _FIXED_LINES
    for_predictors, for_tables, for_versions = _shares(room, [max(1, len(view.followers)), len(tables), len(versions)])
    lines: list[RenderableType] = [*_head(view, width), Text()]
    lines += [_predictors(view, for_predictors), Text()]
    lines += [_table_of_tables(tables, for_tables), Text()]
    lines.append(_versions(versions[:for_versions], view.now))
    held = [f"{each.beat.name} has an error: {each.beat.error}" for each in view.followers if _is_held(each)]
    if view.problem is not None or held:
        lines.append(_one_line(view.problem or held[0], "bold red"))
    elif view.skews:
        more = f" (and {count(len(view.skews) - 1)} more)" if len(view.skews) > 1 else ""
        lines.append(_one_line(view.skews[0] + more, "yellow"))
    return Group(*lines)


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
    watch, now, head = view.watch, view.now, view.watch.head
    title = _one_line("delta-tracker top  ", "bold")
    title.append_text(cell(view.url, "cyan"))
    if head is None:
        return [title, _one_line("the stream no longer exists", "bold red"), Text()]
    state = _one_line("")
    state.append_text(cell(f"version {head.version}", "bold"))
    state.append(f" {head.kind}, {duration(max(0.0, now - head.committed))} old  generation {head.generation}")
    state.append(f"  pending {count(head.pending_rows)}")
    resyncs, held = sum(each.beat.resyncs for each in view.followers), sum(_is_held(each) for each in view.followers)
    state.append(f"  resyncs {count(resyncs)}", "yellow" if resyncs else "")
    state.append(f"  errors {count(held)}", "bold red" if held else "")
    recent, seconds = watch.recent(now), watch.seconds(now)
    rows, num_bytes = sum(entry.num_rows for entry in recent), sum(entry.num_bytes for entry in recent)
    rate = _one_line("")
    for value, unit in (
        (_rate(len(recent) / seconds), "versions/s"),
        (_rate(rows / seconds), "rows/s"),
        (size(num_bytes / seconds), ""),
    ):
        rate.append(value, "bold green" if recent else "dim").append(f" {unit}  " if unit else "/s  ")
    rate.append(f"over {duration(seconds)} ", "dim")
    rate.append(_spark(watch.pulse(now, max(8, min(40, width - rate.cell_len - 1)))), "green")
    return [title, state, rate]


def _predictors(view: View, lines: int) -> Table:
    made = _table("predictor", "state", ">heartbeat", ">version", ">behind", ">for", ">resyncs", "error")
    ranked = sorted(view.followers, key=_urgency, reverse=True)
    if not ranked:
        made.add_row(cell("no predictors", "dim"))
    for each in _fitting(made, ranked, lines, view.num_gone):
        beat, is_live = each.beat, each.state == "live"
        is_behind = each.behind is None or each.behind > 0
        made.add_row(
            cell(beat.name),
            cell(each.state, "green" if is_live else "bold red"),
            cell(duration(each.seconds_ago)),
            cell("none" if beat.version is None else beat.version),
            cell("?" if each.behind is None else count(each.behind), "yellow" if is_behind else "green"),
            cell("?" if beat.lag_seconds is None or not is_live else duration(beat.lag_seconds)),
            cell(count(beat.resyncs), "yellow" if beat.resyncs else ""),
            _one_line(beat.error or "", "red"),
        )
    return made


def _tables(view: View, width: int) -> list[tuple[Text, ...]]:
    """Return one row of cells for each table of the stream, sorted by bytes in descending order."""
    watch, seconds = view.watch, view.watch.seconds(view.now)
    amounts = sorted(watch.amounts(view.now).items(), key=lambda each: (-each[1].num_bytes, each[0]))
    found: list[tuple[Text, ...]] = []
    for fqn, amount in amounts:
        last, spec = watch.changed.get(fqn), watch.tables.get(fqn)
        found.append(
            (
                cell(_short(fqn, max(20, width - 50))),
                cell("?" if spec is None else f"{count(spec.num_rows)} x {spec.dim}", "dim"),
                cell(_rate(amount.rows / seconds), "green" if amount.rows else "dim"),
                cell(size(amount.num_bytes / seconds), "green" if amount.num_bytes else "dim"),
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
            cell(entry.kind, _KINDS.get(entry.kind, "")),
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
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold blue")
    for name in columns:
        made.add_column(
            _one_line(name.removeprefix(">")),
            justify="right" if name.startswith(">") else "left",
            no_wrap=name != columns[-1],
            overflow="ellipsis",
        )
    return made


def _urgency(follower: FollowerView) -> tuple[bool, bool, float]:
    return _is_held(follower), follower.state != "live", follower.behind or 0


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
