"""The tests that a change concerns, as a function of the changed files and of the text of the Python files."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

_DOTTED = re.compile(r"\b(?:benchmarks|delta_tracker|examples|tests)(?:\.\w+)+")
_FROM = re.compile(r"^[ \t]*from ([\w.]+) import (\([^)]*\)|.+)$", re.MULTILINE)
_DOCUMENTS = "tests/documents.py"  # finds every document
# Most of their tests start processes.
_SLOW = ("tests/integrations/", "tests/system/")


@dataclass(frozen=True)
class Selection:
    """Files to test.

    Args:
        reasons: reason for each test file, or module with examples; the most important are first.
        untested: changed files that no test file tests, imports or names.
    """

    reasons: Mapping[str, str]
    untested: tuple[str, ...]


def own_tests(module: str, files: Container[str]) -> list[str]:
    """Return the test files that the path of a module leads to by its name, see ``tests/test_house.py``."""
    *folders, stem = PurePosixPath(module).with_suffix("").parts[1:]
    homes = [PurePosixPath("tests", *folders[:1]), PurePosixPath("tests", "contract")]
    found = [str(home / f"test_{name}.py") for home in homes for name in (stem, *folders[1:])]
    return [path for path in dict.fromkeys(found) if path in files]


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def _in_package(path: str) -> bool:
    return path.startswith("delta_tracker/") and path.endswith(".py")


class _References:
    """The files that each Python file imports, or names in a string.

    Args:
        changed: paths of the changed files.
        sources: text of each Python file.
    """

    def __init__(self, changed: AbstractSet[str], sources: Mapping[str, str]) -> None:
        self._sources = sources
        paths = {path for path in (*sources, *changed) if path.endswith(".py")}
        self._paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}
        data = [PurePosixPath(path) for path in changed if not path.endswith(".py")]
        self._data = {path.name if path.suffix else str(path): str(path) for path in data}
        self._homes = {
            f"{package}.{name}": home
            for package, path in self._paths.items()
            if path.endswith("/__init__.py")
            for name, home in _imported(sources.get(path, ""))
        }
        self.of = cache(self._of)

    def _of(self, path: str) -> frozenset[str]:
        """Return the files that a file imports or names; a package stands for the module that defines the name."""
        text = self._sources[path]
        names = {*_DOTTED.findall(text), *(full for _, full in _imported(text))}
        found = {self._module(self._homes.get(name, name)) for name in names}
        found |= {path for name, path in self._data.items() if f'{name}"' in text}
        return frozenset(found - {None, path})

    def _module(self, name: str) -> str | None:
        """Return the path of the module that a dotted name leads to."""
        while name and name not in self._paths:
            name = name.rpartition(".")[0]
        return self._paths.get(name)

    def of_test(self, test: str) -> dict[str, int]:
        """Return what a test file refers to, also through files outside the package, and through how many of them."""
        fixtures = [str(folder / "conftest.py") for folder in PurePosixPath(test).parents]
        found, new, distance = dict[str, int](), {test, *(path for path in fixtures if path in self._sources)}, 0
        while new:
            found |= dict.fromkeys(new, distance)
            helpers = {path for path in new & self._sources.keys() if path == test or not _is_test(path)}
            new = set[str]().union(*(self.of(path) for path in helpers if not _in_package(path)))
            new, distance = new - found.keys(), distance + 1
        return found


def _imported(text: str) -> list[tuple[str, str]]:
    """Return the names that a file imports from modules, each with its full name."""
    return [(name, f"{module}.{name}") for module, names in _FROM.findall(text) for name in re.findall(r"\w+", names)]


def select(changed: AbstractSet[str], sources: Mapping[str, str]) -> Selection:
    """Select the tests of a change.

    Args:
        changed: paths of the files that were changed, added or deleted; both paths of a file that was moved.
        sources: text of each Python file after the change, by its path.
    """
    references = _References(changed, sources)
    tests = {path: references.of_test(path) for path in sources if _is_test(path)}
    modules = sorted(filter(_in_package, changed))
    others = sorted(changed - {*modules, *tests})
    reasons = dict.fromkeys(sorted(changed & tests.keys()), "was changed")
    untested = {path for path in (*modules, *others) if path in sources or not path.endswith(".py")}

    def add(paths: Iterable[str], reason: str, path: str = "") -> None:
        def order(test: str) -> tuple[object, ...]:
            found = tests.get(test, {})
            return test.startswith(_SLOW), found.get(path, 0), len(found), test

        for each in sorted(paths, key=order):
            reasons.setdefault(each, reason)
            untested.discard(path)

    def users(path: str) -> list[str]:
        return [test for test, found in tests.items() if path in found]

    for path in modules:
        add(own_tests(path, sources), f"tests {path}", path)
        add([path] if ">>>" in sources.get(path, "") else [], "has examples")
    for path in others:
        add(users(path), f"uses {path}", path)
        add(users(_DOCUMENTS) if path.endswith(".md") else [], f"checks {path}", path)
    top = [path for path in tests if path.count("/") == 1]
    add((path for path in top if path.replace("tests/test_", "delta_tracker/") not in sources), "checks the house")
    for path in sorted(modules, key=lambda path: len(users(path))):  # a module of few tests says most about them
        add(users(path), f"uses {path}", path)
    for path in (*modules, *others):
        for user in sorted(user for user in sources if _in_package(user) and path in references.of(user)):
            add(own_tests(user, sources), f"tests {user}, which uses {path}", path)
    return Selection(reasons, tuple(sorted(untested)))
