"""Change the imports of a module, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Mapping

_Import = ast.Import | ast.ImportFrom


def with_imports(source: str, homes: Mapping[str, str], first: str = "") -> str:
    """Return the source of a module that imports from other modules. No other line, and no line number, differs.

    Args:
        source: the module.
        homes: old place to the module that replaces it. A place is ``import torch`` for this statement, or the path of
            a module or a name, for all statements that import something at or below it with ``from``.
        first: module that is imported before all others; empty for none.
    """
    lines = source.splitlines()
    nodes = sorted((node for node in ast.walk(ast.parse(source)) if isinstance(node, _Import)), key=_position)
    for node in reversed(nodes):  # so that the positions of the others stay
        (start, begin), (last, end) = _position(node), (node.end_lineno or 0, node.end_col_offset)
        new = [f"import {first}"] if first and node is nodes[0] else []
        new += [ast.unparse(_moved(node, alias, homes)) for alias in node.names]
        text = lines[start - 1][:begin] + "; ".join(new) + lines[last - 1][end:]
        lines[start - 1 : last] = [text, *[""] * (last - start)]
    changed = "\n".join(lines) + "\n"
    assert without_imports(changed) == without_imports(source), "more than imports differs"
    return changed


def without_imports(source: str) -> str:
    """Return all statements of a module that are not imports, with their line numbers."""
    tree = _Without().visit(ast.parse(source))
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return f"{lines}\n{ast.dump(tree, indent=1)}"


class _Without(ast.NodeTransformer):
    def visit_Import(self, _: ast.Import) -> None:
        """Remove the statement."""

    def visit_ImportFrom(self, _: ast.ImportFrom) -> None:
        """Remove the statement."""


def _position(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _moved(node: _Import, alias: ast.alias, homes: Mapping[str, str]) -> ast.stmt:
    """Return the import of one name from its new place."""
    if isinstance(node, ast.Import):
        home = homes.get(f"import {alias.name}")
        return ast.Import([alias]) if home is None else ast.ImportFrom(home, [alias], 0)
    path = f"{node.module}.{alias.name}"
    places = [place for place in homes if f"{path}.".startswith(f"{place}.")]
    return ast.ImportFrom(homes[max(places, key=len)] if places else node.module, [alias], 0)
