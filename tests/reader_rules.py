"""Rules of a reader and steps between its states: ``python -m tests.reader_rules`` writes the table in FLEET.md."""

from __future__ import annotations

import re
from pathlib import Path

from delta_tracker.stream.reading.decisions import Rule

_FLEET = Path(__file__).parent.parent / "delta_tracker" / "FLEET.md"
_BEGIN, _END = "<!-- rules -->\n", "<!-- /rules -->"
_ARROW = re.compile(r"^ +(\S+) --> (\S+): ([A-Z_, ]+)$", flags=re.MULTILINE)

Step = tuple[str, str, Rule]
"""State before a decision, state after it, and its rule."""


def markdown() -> str:
    """Return the table of the rules."""
    rows = [f"| `{rule.name}` | {rule.when} | {rule.does} | {rule.shown} |\n" for rule in Rule]
    return "".join(["| rule | when | the predictor | shown |\n", "|---|---|---|---|\n", *rows])


def table() -> str:
    """Return the table in the document."""
    return _FLEET.read_text().partition(_BEGIN)[2].partition(_END)[0]


def steps() -> set[Step]:
    """Return the steps in the diagram of the document."""
    diagram = re.findall(r"```mermaid\n(.*?)```", _FLEET.read_text(), flags=re.DOTALL)
    arrows = _ARROW.findall("".join(diagram))
    return {(before, after, Rule[name]) for before, after, names in arrows for name in names.split(", ")}


def main() -> None:
    """Write the table into the document."""
    before, _, rest = _FLEET.read_text().partition(_BEGIN)
    _FLEET.write_text(before + _BEGIN + markdown() + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
