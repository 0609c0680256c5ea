"""Rules of a reader and steps between its states, as FLEET.md has them."""

from __future__ import annotations

import re
from pathlib import Path

from delta_tracker.stream.reading.decide import Rule

_FLEET = Path(__file__).parent.parent / "delta_tracker" / "FLEET.md"
_BEGIN, _END = "<!-- rules -->\n", "<!-- /rules -->"
_ARROW = re.compile(r"^ +(\S+) --> (\S+): ([A-Z_, ]+)$", flags=re.MULTILINE)

Step = tuple[str, str, Rule]
"""State before a decision, state after it, and its rule."""


def table() -> list[tuple[str, str]]:
    """Return the rules in the table of the document, each with its condition."""
    rows = _FLEET.read_text().partition(_BEGIN)[2].partition(_END)[0].splitlines()[2:]
    return [(name.strip(" `"), when.strip()) for _, name, when, *_ in (row.split("|") for row in rows)]


def steps() -> set[Step]:
    """Return the steps in the diagram of the document."""
    diagram = re.findall(r"```mermaid\n(.*?)```", _FLEET.read_text(), flags=re.DOTALL)
    arrows = _ARROW.findall("".join(diagram))
    return {(before, after, Rule[name]) for before, after, names in arrows for name in names.split(", ")}
