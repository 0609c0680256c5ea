"""Rules of a reader and steps between its states, as `guide/fleet.md` has them."""

from __future__ import annotations

import re
from pathlib import Path

from delta_tracker.stream.reading.decide import Rule

_PAGE = Path(__file__).parent.parent / "delta_tracker" / "guide" / "fleet.md"

Step = tuple[str, str, Rule]
"""State before a decision, state after it, and its rule."""


def table() -> list[tuple[str, str]]:
    """Return the rules in the table of the document, each with its condition."""
    return [(name.strip("`"), when) for name, when, *_ in _rows("rules")]


def steps() -> set[Step]:
    """Return the steps in the table of the document."""
    return {
        (before, after, Rule[name])
        for origins, after, cause in _rows("steps")
        for before in origins.split(", ")
        for name in re.findall(r"`([A-Z_]+)`", cause)
    }


def _rows(name: str) -> list[list[str]]:
    """Return the cells of a table that is marked with its name, without its head."""
    table = _PAGE.read_text().partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
