"""Tables of predictors and of versions, which several commands print."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from delta_tracker.cli.attention import Level, level_of
from delta_tracker.cli.entries import Entry
from delta_tracker.cli.output import cell, table
from delta_tracker.cli.predictors import SeenPredictor
from delta_tracker.cli.text import count, duration, format_time, size

KIND_STYLES = {"snapshot": "cyan", "claim": "yellow", "delta": ""}
SIGNS: dict[Level, tuple[str, str]] = {"fault": ("✕ ", "bold red"), "warning": ("! ", "yellow"), "note": ("i ", "")}
PREDICTOR_COLUMNS = ("predictor", "state", "host", ">heartbeat", ">version", ">behind", ">for", ">resyncs")
_VERSION_COLUMNS = (">version", "kind", ">age", ">batches", ">rows", ">bytes", ">pending", ">took", ">ids in / out")


def predictor_cells(predictor: SeenPredictor) -> list[Text]:
    """Return the cells of a table row about a predictor. The columns are ``PREDICTOR_COLUMNS``."""
    beat, level = predictor.beat, level_of(predictor.health)
    sign, style = ("", "") if level == "note" else SIGNS[level]
    figures = ["-"] * 4  # what a silent one wrote last is not what is now
    if not predictor.is_silent:
        figures = [
            "none" if beat.version is None else str(beat.version),
            "?" if predictor.behind is None else count(predictor.behind),
            "-" if not predictor.behind else "?" if beat.lag_seconds is None else duration(beat.lag_seconds),
            count(beat.resyncs),
        ]
    cells = (beat.host or "unknown", duration(predictor.seconds_ago), *figures)
    return [cell(beat.name), cell(sign + predictor.health, style), *map(cell, cells)]


def no_data_text(predictor: SeenPredictor, now: float) -> str:
    """Return a text about the last heartbeat of a silent predictor. ``now`` is the store's time in Unix seconds."""
    last = "" if predictor.beat.version is None else f" at version {predictor.beat.version}"
    return f"no data since {format_time(now - predictor.seconds_ago)}{last}"


def version_table(entries: Sequence[Entry], now: float, *, is_cut: bool = False) -> Table:
    """Return a table with one row per entry. The column of raw ids is omitted if no entry has tables with raw ids.

    ``now`` is the store's time in Unix seconds. ``is_cut`` is passed to :func:`~delta_tracker.cli.output.table`.
    """
    num_columns = len(_VERSION_COLUMNS) - (not any(entry.owners for entry in entries))
    rows = (
        (
            entry.version,
            cell(entry.kind, KIND_STYLES[entry.kind]),
            duration(max(0.0, now - entry.committed)),
            f"{entry.batches[0]} to {entry.batches[1]}",
            count(entry.num_rows),
            size(entry.num_bytes),
            count(entry.pending_rows),
            entry.took,
            entry.owner_changes,
        )
        for entry in entries
    )
    return table(_VERSION_COLUMNS[:num_columns], (row[:num_columns] for row in rows), is_cut=is_cut)
