"""Mutations of the package: which function loses what.

A mutation names a function by its qualified name, as ``HostCopy.result``, wherever the package defines it. If several
functions have this name, the names of their modules come first, as ``dcp_checkpoint._target``. Mutations work on the
syntax tree, so that neither comments, line breaks nor the place of the function matter.

The patterns of :class:`Loses` and :class:`Replaces` are expressions in which ``_`` matches any expression, and the
arguments ``(...)`` any arguments. A call of a bare name also matches a call of a method with this name:
``synchronize(...)`` matches ``self.copied.synchronize()``. A pattern matches once in the function, unless ``nth`` says
which match counts.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Definition = ast.FunctionDef | ast.ClassDef
T = TypeVar("T")
_LOAD = ast.Load()


class OutdatedError(Exception):
    """A mutation does not fit the code any more."""


@dataclass(frozen=True)
class Mutation(ABC):
    """Change of one function.

    Args:
        function: qualified name of the function.
    """

    function: str

    def mutate(self, modules: Mapping[str, ast.Module]) -> str:
        """Change the function in its module, and return the name of the module.

        Args:
            modules: dotted name of each module to its syntax tree.

        Raises:
            OutdatedError: if the package has no such function, or if it has not what it would lose.
        """
        module, found = self._find(modules)
        try:
            self._change(found)
        except LookupError as error:
            raise OutdatedError(f"{self.function} in {module}: {error.args[0]}") from None
        ast.fix_missing_locations(found)
        return module

    @abstractmethod
    def _change(self, function: ast.FunctionDef) -> None:
        """Change a function.

        Raises:
            LookupError: if the function has not what it would lose.
        """

    def _find(self, modules: Mapping[str, ast.Module]) -> tuple[str, ast.FunctionDef]:
        found = [
            (module, f"{module}.{name}", node)
            for module, tree in modules.items()
            for name, node in _definitions(tree)
            if f".{module}.{name}".endswith(f".{self.function}") and isinstance(node, ast.FunctionDef)
        ]
        if not found:
            raise OutdatedError(f"{self.function} was not found: write its new name, or delete the revert")
        if len(found) > 1:
            names = " and ".join(name for _, name, _ in found)
            raise OutdatedError(f"{self.function} is {names}: write a longer name")
        return found[0][0], found[0][2]


@dataclass(frozen=True)
class DoesNothing(Mutation):
    """The function returns None; a generator or context manager yields nothing."""

    def _change(self, function: ast.FunctionDef) -> None:
        is_generator = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))
        function.body = ast.parse("if False:\n    yield" if is_generator else "pass").body


@dataclass(frozen=True)
class Returns(Mutation):
    """The function returns another value and does nothing else.

    Args:
        value: the value, an expression of the function's arguments and globals.
    """

    value: str

    def _change(self, function: ast.FunctionDef) -> None:
        function.body = [ast.Return(_expression(self.value))]


@dataclass(frozen=True)
class Loses(Mutation):
    """The function loses a statement: a call, an assignment, or a ``raise``.

    Args:
        what: pattern of the call, of a target of the assignment, or of the exception.
        nth: which of several matches, from 1.
    """

    what: str
    nth: int | None = None

    def _change(self, function: ast.FunctionDef) -> None:
        pattern = _expression(self.what)
        matches = [
            (block, at)
            for block in _blocks(function)
            for at, statement in enumerate(block)
            if any(_matches(pattern, node, []) for node in _subjects(statement))
        ]
        block, at = _only(matches, f"statement {self.what}", self.nth)
        block[at] = ast.Pass()


@dataclass(frozen=True)
class Replaces(Mutation):
    """The function has another expression in the place of one.

    Args:
        what: pattern of the expression.
        by: the other expression. ``_`` is what the first ``_`` of the pattern matched; if the pattern has none, it is
            the replaced expression.
        nth: which of several matches, from 1.
    """

    what: str
    by: str
    nth: int | None = None

    def _change(self, function: ast.FunctionDef) -> None:
        pattern = _expression(self.what)
        read = [node for node in _own_nodes(function) if isinstance(getattr(node, "ctx", _LOAD), ast.Load)]
        node = _only([node for node in read if _matches(pattern, node, [])], f"expression {self.what}", self.nth)
        held: list[ast.AST] = []
        _matches(pattern, node, held)
        by = _Replacing(_is_any, held[0] if held else node).visit(_expression(self.by))
        _Replacing(lambda each: each is node, by).visit(function)


class _Replacing(ast.NodeTransformer):
    """Replaces each node that qualifies."""

    def __init__(self, qualifies: Callable[[ast.AST], bool], by: ast.AST) -> None:
        self._qualifies = qualifies
        self._by = by

    def visit(self, node: ast.AST) -> ast.AST:
        if self._qualifies(node):
            return self._by
        return self.generic_visit(node)


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the qualified name of each function and class, and its node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, prefix)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body in the order of the code, without those of functions inside it."""
    waiting: list[ast.AST] = function.body[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Definition):
            waiting += list(ast.iter_child_nodes(node))[::-1]


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Yield each list of statements in a function's body."""
    yield function.body
    for node in _own_nodes(function):
        if not isinstance(node, Definition):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, name, None), list):
                    yield block


def _subjects(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions by which a pattern finds a statement."""
    if isinstance(statement, ast.Expr):
        return [statement.value]
    if isinstance(statement, ast.Assign):
        return statement.targets
    if isinstance(statement, ast.AugAssign | ast.AnnAssign):
        return [statement.target]
    return [statement.exc] if isinstance(statement, ast.Raise) and statement.exc is not None else []


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "_"


def _matches(pattern: object, found: object, held: list[ast.AST]) -> bool:
    """Return True if a pattern matches, and append what its ``_`` match, in the order of the code."""
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        held.append(found)
        return isinstance(found, ast.expr)
    if isinstance(pattern, ast.Call) and isinstance(found, ast.Call):
        return _calls_match(pattern, found, held)
    if isinstance(pattern, ast.AST):
        names = [name for name in pattern._fields if name != "ctx"]
        return type(pattern) is type(found) and all(
            _matches(getattr(pattern, name), getattr(found, name), held) for name in names
        )
    if isinstance(pattern, list):
        pairs = zip(pattern, found, strict=False)
        return len(pattern) == len(found) and all(_matches(one, other, held) for one, other in pairs)
    return pattern == found


def _calls_match(pattern: ast.Call, found: ast.Call, held: list[ast.AST]) -> bool:
    if isinstance(pattern.func, ast.Name) and isinstance(found.func, ast.Attribute):
        is_same = pattern.func.id == found.func.attr
    else:
        is_same = _matches(pattern.func, found.func, held)
    if any(isinstance(each, ast.Constant) and each.value is ... for each in pattern.args):
        return is_same
    return is_same and _matches(pattern.args, found.args, held) and _matches(pattern.keywords, found.keywords, held)


def _only(matches: Sequence[T], what: str, nth: int | None) -> T:
    if not matches:
        raise LookupError(f"it has no {what}: write what it has instead, or delete the revert")
    if len(matches) < (nth or 1) or (nth is None and len(matches) > 1):
        raise LookupError(f"it has {len(matches)} times the {what}: say with nth= which one")
    return matches[(nth or 1) - 1]
