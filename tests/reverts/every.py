"""All reverts of this folder, whether they fit the code, and how one is applied."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import reverts
from tests.reverts.mutation import OutdatedError
from tests.reverts.revert import Revert

_NO_REVERTS = {"__main__", "every", "mutation", "revert"}


def all_reverts() -> list[tuple[str, Revert]]:
    """Return pairs of a generator and a revert, from every file of this folder."""
    names = [module.name for module in pkgutil.iter_modules(reverts.__path__) if module.name not in _NO_REVERTS]
    modules = [importlib.import_module(f"tests.reverts.{name}") for name in names]
    return [(generator, each) for module in modules for generator, found in module.REVERTS.items() for each in found]


def apply(revert: Revert, root: Path) -> None:
    """Apply the mutations of a revert to the package below ``root``.

    Raises:
        OutdatedError: if a mutation does not fit the code.
    """
    for path, text in _mutated(revert, _texts(root)).items():
        (root / path).write_text(text)


def outdated(chosen: Iterable[tuple[str, Revert]], root: Path) -> list[str]:
    """Return what does not fit the code and the tests below ``root`` any more, and what to do about it."""
    found, texts = [], _texts(root)
    for generator, revert in chosen:
        file, _, test = generator.partition("::")
        path = root / file
        if not path.is_file() or (test and f"def {test.partition('[')[0]}(" not in path.read_text()):
            found.append(f"{revert.defect}: {generator} was not found: name another test that finds it")
        try:
            _mutated(revert, texts)
        except OutdatedError as error:
            found.append(f"{revert.defect}: {error}")
    return found


def _texts(root: Path) -> dict[Path, str]:
    return {path.relative_to(root): path.read_text() for path in (root / "delta_tracker").rglob("*.py")}


def _mutated(revert: Revert, texts: Mapping[Path, str]) -> dict[Path, str]:
    """Return the new texts of the files that a revert changes."""
    words = [f"def {mutation.function.rpartition('.')[2]}(" for mutation in revert.mutations]
    near = [path for path, text in texts.items() if any(word in text for word in words)]
    paths = {".".join(path.with_suffix("").parts): path for path in sorted(near)}
    trees = {module: ast.parse(texts[path]) for module, path in paths.items()}
    changed = {mutation.mutate(trees) for mutation in revert.mutations}
    return {paths[module]: ast.unparse(trees[module]) for module in sorted(changed)}
