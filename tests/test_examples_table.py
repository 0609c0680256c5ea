"""The table of examples names each example, and the extras and processes that its code needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"
_ROW = re.compile(
    r"\| `(\w+)` \|[^|]*\| (?P<extras>[^|;]*); (?P<processes>\d|\d to \d) process(?:es)?(?P<more>[^|]*) \|"
)
_DISTRIBUTIONS = {"fastapi": "examples", "uvicorn": "examples", "pytorch_lightning": "lightning"}
_OWN = {"delta_tracker", "examples", "numpy"}


def _rows() -> dict[str, re.Match[str]]:
    text = (_EXAMPLES / "README.md").read_text()
    return {match[1]: match for match in map(_ROW.match, text.splitlines()) if match}


def _names() -> list[str]:
    return [*sorted(path.stem for path in _EXAMPLES.glob("*.py") if path.stem != "__init__"), "quickstart"]


def _files(name: str) -> list[Path]:
    path = _EXAMPLES / f"{name}.py"
    return [path] if path.exists() else sorted((_EXAMPLES / name).glob("[a-z]*.py"))


def _modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and node.value == "delta_tracker.cli":  # python -m delta_tracker.cli
            yield node.value


@cache
def _extras() -> set[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return {*project["optional-dependencies"]}


def _needed(path: Path) -> set[str]:
    """Return the extras of the packages that a file imports, and of those that modules of the library ask for."""
    found = set[str]()
    for module in _modules(path):
        top = module.partition(".")[0]
        if module == "delta_tracker.cli":
            found.add("cli")
        elif top == "examples":
            found |= _needed(_ROOT / f"{module.replace('.', '/')}.py")
        elif module.startswith(
            ("delta_tracker.sinks.", "delta_tracker.stream.notify.", "delta_tracker.monitor.sinks.")
        ):
            text = (_ROOT / f"{module.replace('.', '/')}.py").read_text()
            found.update(re.findall(r'import_optional\("\w+", "\w+", "(\w+)"\)', text))
        elif top not in _OWN and top not in sys.stdlib_module_names:
            found.add(_DISTRIBUTIONS.get(top, top))
    return found


def test_the_table_has_all_examples() -> None:
    assert sorted(_rows()) == sorted(_names())


@pytest.mark.parametrize("name", _names())
def test_the_needs_are_those_of_the_code(name: str) -> None:
    row = _rows()[name]
    named = set(re.findall(r"`([\w-]+)`", row["extras"]))
    assert named <= _extras()
    needed = set[str]().union(*map(_needed, _files(name)))
    if "torchrec" in needed:  # the extra includes torch and torchmetrics
        needed -= {"torch", "torchmetrics"}
    assert named == needed
    texts = "".join(path.read_text() for path in _files(name))
    is_several = bool(re.search(r"nproc-per-node|subprocess|in its own terminal", texts))
    assert (row["processes"] != "1") == is_several
