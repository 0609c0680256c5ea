"""Each test with a long form is marked, so that a target of the Makefile runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.sweeps import FORMS, is_selected

_TESTS = Path(__file__).parent
_FILES = [path for path in sorted(_TESTS.rglob("test_*.py")) if "SWEEPS_ARE_WHOLE" in path.read_text()]


def _names(node: ast.AST) -> set[str]:
    """Return all names and arguments in ``node``; arguments may be fixtures."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}


def _with_a_long_form(module: ast.Module) -> list[ast.FunctionDef]:
    """Return the tests that use ``SWEEPS_ARE_WHOLE``, also through constants, functions and fixtures of the module."""
    uses: dict[str, set[str]] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            uses[node.name] = _names(node)
        elif isinstance(node, ast.Assign):
            uses |= dict.fromkeys(set[str]().union(*map(_names, node.targets)), _names(node.value))
    found, size = {"SWEEPS_ARE_WHOLE"}, 0
    while size < len(found):
        size = len(found)
        found |= {name for name, used in uses.items() if used & found}
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [test for test in tests if test.name in found]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_what_has_a_long_form_is_marked(path: Path) -> None:
    unmarked = [
        test.name
        for test in _with_a_long_form(ast.parse(path.read_text()))
        if not any("mark.sweep(" in ast.unparse(decorator) for decorator in test.decorator_list)
    ]
    assert not unmarked, f"mark them with @pytest.mark.sweep({' or '.join(map(repr, FORMS))}), see tests/sweeps.py"


def test_each_target_runs_one_form() -> None:
    makefile = (_TESTS.parent / "Makefile").read_text()
    for form in (*FORMS, "daily"):
        assert makefile.count(f"DELTA_TRACKER_WHOLE_SWEEPS={form} $(SWEEPS)") == 1


def test_ci_runs_each_test_in_one_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs the long forms of a tenth of the short sweeps, and all other tests as ``make test`` does."""
    ci = (_TESTS.parent / ".ci" / "run").read_text()
    assert ci.count("DELTA_TRACKER_WHOLE_SWEEPS=rest make --no-print-directory test\n") == 1
    assert " test-daily-sweeps " in ci
    for marks in ([], [pytest.mark.sweep("short")], [pytest.mark.sweep("long")]):
        test = pytest.Function.from_parent(request.node.parent, name="some_test", callobj=lambda: None)
        for mark in marks:
            test.add_marker(mark)
        num_daily = 0
        for day in range(10):
            monkeypatch.setattr("time.time", lambda day=day: day * 86400.0)
            is_daily = is_selected(test, "daily")
            assert is_selected(test, "rest") != is_daily
            num_daily += is_daily
        assert num_daily == (1 if marks == [pytest.mark.sweep("short")] else 0)
        assert is_selected(test, "")
