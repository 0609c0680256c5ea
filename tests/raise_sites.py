"""The places of the package that raise its errors, and the tests that follow their advice."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from delta_tracker import errors

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "delta_tracker"
_BASES = {"DeltaTrackerError", "CheckpointError", "_CausedError"}

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DeltaTrackerError) and name not in _BASES
}


@dataclass(frozen=True, order=True)
class Site:
    """A function that makes an error: the name of the error's class, and the qualified name of the function."""

    error: str
    function: str


def sites() -> dict[Site, list[ast.Call]]:
    """Return the calls of each place that makes an error, from the source of the package."""
    found: dict[Site, list[ast.Call]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path != _PACKAGE / "errors.py":
            for site, call in _calls(ast.parse(path.read_text()), ""):
                found.setdefault(site, []).append(call)
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[Site, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.Call):
            name = ast.unparse(child.func).rpartition(".")[2]
            if name in ERRORS:
                yield Site(name, function), child
        yield from _calls(child, inner)
