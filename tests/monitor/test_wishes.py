"""The table in ``wishes.md`` is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import delta_tracker.monitor
from delta_tracker.monitor import monitor

_TABLE = Path(delta_tracker.monitor.__file__).parent / "wishes.md"
_TESTS = Path(__file__).parent
_ROW = re.compile(r"\| (\d+) \| ([^|]+) \| ([^|]+) \| (test_\w+\.py)::(test_\w+) \|")


def test_every_wish_is_answered_and_tested() -> None:
    rows = [_ROW.fullmatch(line) for line in _TABLE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert all(rows)
    assert [int(row[1]) for row in rows] == list(range(1, 39))
    for row in rows:
        tree = ast.parse((_TESTS / row[4]).read_text())
        assert row[5] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row[0]


def test_the_example_of_the_docstring_runs() -> None:
    found = doctest.testmod(monitor)
    assert found.attempted > 0
    assert found.failed == 0
