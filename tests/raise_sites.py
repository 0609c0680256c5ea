"""The places of the package that raise its errors, and the tests that follow their advice."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from delta_tracker import errors

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "delta_tracker"
_TESTS_OF_TYPES = {"isinstance", "issubclass", "suppress"}

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DeltaTrackerError) and kind is not errors.DeltaTrackerError
}


@dataclass(frozen=True, order=True)
class Site:
    """A function that makes an error: the name of the error's class, and the qualified name of the function."""

    error: str
    function: str


def sites() -> dict[Site, list[ast.AST]]:
    """Return what makes an error in each function: calls of its class, and other uses of the class that lead to one."""
    found: dict[Site, list[ast.AST]] = {}
    for tree in _trees():
        for site, node in _uses(tree, ""):
            found.setdefault(site, []).append(node)
    return found


def calls_of(name: str) -> list[ast.Call]:
    """Return the calls of a function or class in the package."""
    nodes = (node for tree in _trees() for node in ast.walk(tree))
    return [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == name]


@cache
def _trees() -> list[ast.Module]:
    paths = sorted(set(_PACKAGE.rglob("*.py")) - {_PACKAGE / "errors.py"})
    return [ast.parse(path.read_text()) for path in paths]


def _uses(node: ast.AST, function: str) -> Iterator[tuple[Site, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
        elif isinstance(child, ast.Call):
            name = _name(child.func)
            if isinstance(child.func, ast.Attribute) and _name(child.func.value) in ERRORS:  # a class method
                name = _name(child.func.value)
            if name in ERRORS:
                yield Site(name, function), child
            elif name not in _TESTS_OF_TYPES:
                values = [*child.args, *(keyword.value for keyword in child.keywords)]
                yield from ((Site(_name(value), function), value) for value in values if _name(value) in ERRORS)
        elif isinstance(child, ast.Raise | ast.Assign):
            value = child.exc if isinstance(child, ast.Raise) else child.value
            names = [_name(each) for each in (value.elts if isinstance(value, ast.Tuple) else [value])]
            if isinstance(child, ast.Raise) or not isinstance(value, ast.Tuple):
                yield from ((Site(name, function), child) for name in names if name in ERRORS and _is_class(value))
            elif function:  # of values that are assigned at once, not a constant with classes to catch
                yield from ((Site(name, function), child) for name in names if name in ERRORS)
        yield from _uses(child, inner)


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_class(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def advice_of(site: Site, node: ast.AST) -> set[str]:
    """Return the first words of the advice of an ``InvalidArgumentError``; ``...`` for one that is not a literal."""
    text = node.args[2] if isinstance(node, ast.Call) and len(node.args) > 2 else None
    if isinstance(text, ast.JoinedStr) and isinstance(text.values[0], ast.FormattedValue):
        text = text.values[0].value
    if isinstance(text, ast.Name):
        return {word for value in _assigned(site, text.id) for word in _first_words(value)} or {"..."}
    return _first_words(text)


def _assigned(site: Site, name: str) -> list[ast.expr]:
    """Return the values of a variable or constant in the files and functions of a site."""
    found = []
    for tree, functions in _indexed():
        if site.function in functions:
            for scope in (tree, functions[site.function]):
                body = ast.walk(scope) if scope is not tree else tree.body
                found += [
                    each.value for each in body if isinstance(each, ast.Assign) and _name(each.targets[0]) == name
                ]
    return found


@cache
def _indexed() -> list[tuple[ast.Module, dict[str, ast.AST]]]:
    return [(tree, dict(_functions(tree, ""))) for tree in _trees()]


def _functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}" if function else child.name
            yield inner, child
        yield from _functions(child, inner)


def _first_words(text: ast.AST | None) -> set[str]:
    if isinstance(text, ast.IfExp):
        return _first_words(text.body) | _first_words(text.orelse)
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    return {str(text.value).partition(" ")[0]} if isinstance(text, ast.Constant) else {"..."}


def followed() -> dict[str, set[Site]]:
    """Return the sites that the marker ``advice`` of each test names."""
    found: dict[str, set[Site]] = {}
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        for test in ast.walk(ast.parse(path.read_text())):
            if isinstance(test, ast.FunctionDef):
                for mark in (each for decorator in test.decorator_list for each in ast.walk(decorator)):
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.advice":
                        texts = [ast.literal_eval(argument) for argument in mark.args]
                        name = f"{path.relative_to(_ROOT)}::{test.name}"
                        found.setdefault(name, set()).update(site for text in texts for site in named(text))
    return found


def named(text: str) -> set[Site]:
    """Return the sites in one argument of the marker, such as ``"SinkError: LmdbSink._opened RedisSink._client"``."""
    error, _, functions = text.partition(": ")
    return {Site(error, function) for function in functions.split()}


@contextmanager
def made() -> Iterator[set[Site]]:
    """Yield a set to which each error of the library that this process makes inside the block is added."""
    found: set[Site] = set()
    make = errors.DeltaTrackerError.__init__

    def recording(error: errors.DeltaTrackerError, *arguments: str) -> None:
        make(error, *arguments)
        frame = sys._getframe(1)
        while Path(frame.f_code.co_filename) == _PACKAGE / "errors.py" and frame.f_back is not None:
            frame = frame.f_back
        names = frame.f_code.co_qualname.split(".")
        found.add(Site(type(error).__name__, ".".join(name for name in names if not name.startswith("<"))))

    errors.DeltaTrackerError.__init__ = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        errors.DeltaTrackerError.__init__ = make  # type: ignore[method-assign]
