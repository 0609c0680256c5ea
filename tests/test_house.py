"""Rules of the package: import order, public names, no heavy imports, and where the tests are.

The tests of ``delta_tracker/PACKAGE/NAME.py`` are in ``tests/PACKAGE/test_NAME.py``, and those of a module directly in
``delta_tracker/`` in ``tests/test_NAME.py``. Two kinds of files test a whole subpackage
``delta_tracker/PACKAGE/FOLDER/``: ``tests/PACKAGE/test_FOLDER.py``, and ``tests/contract/test_FOLDER.py`` for what
every implementation has to pass. A module without a file of its name is tested by the files of those that
import it. Tests that start processes are in ``tests/system/`` or ``tests/integrations/``, unless they belong to a
module or need a server. Tests for a GPU are in ``tests/gpu/``. Tests that follow the advice of errors are in
``tests/advice/``, and those with another release of the library in ``tests/releases/``. A test file that has no
module's name tests a behavior of several.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import delta_tracker
from tests.changed import own_tests

_ROOT = Path(__file__).parent.parent

_PACKAGE = _ROOT / "delta_tracker"

# A package may import itself and packages of earlier lines: ``tracker`` does not import ``predictor``.
_LAYERS = [
    [
        "errors",
        "arguments",
        "types",
        "rows",
        "row_target",
        "raw_ids",
        "live_objects",
        "buffers",
    ],
    ["monitor"],
    ["sharding", "stream"],
    ["sinks"],
    ["tracker", "predictor"],
    ["publisher", "compat"],
    ["recovery", "planning"],
    ["integrations", "cli"],
]

_MODULES = {
    ".".join(path.relative_to(_PACKAGE).with_suffix("").parts): path
    for path in sorted(_PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}

_FILES = {
    ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("delta_tracker", "tests", "benchmarks", "examples")
    for path in sorted((_ROOT / package).rglob("*.py"))
}

_TESTS = [
    name.removeprefix("tests.")
    for name in _FILES
    if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
]


def _statements(nodes: Iterable[ast.AST], *, in_functions: bool) -> Iterator[ast.AST]:
    """Yield the statements in some nodes, with those in functions or without."""
    for node in nodes:
        yield node
        if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "handlers", "finalbody", "cases"):
                yield from _statements(getattr(node, field, []), in_functions=in_functions)


@cache
def _import_statements(path: Path) -> dict[bool, list[ast.Import | ast.ImportFrom]]:
    """Return the import statements of a file: all, for True, and those that run when it is imported, for False."""
    body = ast.parse(path.read_text()).body
    return {
        in_functions: [
            each
            for each in _statements(body, in_functions=in_functions)
            if isinstance(each, ast.Import | ast.ImportFrom)
        ]
        for in_functions in (False, True)
    }


def _named(nodes: Iterable[ast.Import | ast.ImportFrom]) -> set[str]:
    """Return the modules, and the names in modules, that import statements name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, "relative import"
            homes = delta_tracker._HOMES if node.module == "delta_tracker" else {}
            found |= {node.module or "", *(homes.get(each.name, f"{node.module}.{each.name}") for each in node.names)}
    return found


@cache
def _loads(name: str) -> frozenset[str]:
    """Return what one of our modules loads at import, including its parent packages."""
    found = _named(_import_statements(_FILES[name])[False]) if name in _FILES else set()
    return frozenset(found | {name.rpartition(".")[0]} - {""})


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return what a file imports anywhere."""
    return frozenset(_named(_import_statements(path)[True]))


def _closure(names: Iterable[str], after: Callable[[str], Iterable[str]]) -> set[str]:
    """Return the names, and what follows ``after`` each, repeatedly."""
    found = set(names)
    waiting = [*found]
    while waiting:
        new = set(after(waiting.pop())) - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_imports_run_one_way(name: str) -> None:
    own = name.partition(".")[0]
    layer = next((index for index, packages in enumerate(_LAYERS) if own in packages), None)
    assert layer is not None, f"add {own!r} to _LAYERS"
    allowed = {own}.union(*_LAYERS[: max(layer, 1)])
    ours = {module.split(".")[1] for module in _imports(_MODULES[name]) if module.startswith("delta_tracker.")}
    assert ours <= allowed


@pytest.mark.parametrize("name", [name for name in sorted(_MODULES) if not name.startswith("sharding.")])
def test_only_sharding_knows_torchrec(name: str) -> None:
    assert not {module for module in _imports(_MODULES[name]) if module.split(".")[0] in ("torchrec", "fbgemm_gpu")}


@pytest.mark.parametrize("name", [name for name in sorted(_MODULES) if not name.startswith("monitor.")])
def test_the_core_is_given_its_monitor(name: str) -> None:
    """Only the monitor's modules use the default monitor; the others get a recorder, which is bound to a monitor."""
    names = {
        alias.name
        for node in _import_statements(_MODULES[name])[True]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("delta_tracker.monitor")
        for alias in node.names
    }
    assert not names & {"MONITOR", "metrics"}


@pytest.mark.parametrize("name", [name for name in _TESTS if name.partition(".")[0] not in ("system", "integrations")])
def test_a_test_file_names_the_torchrec_and_the_processes_that_it_loads(name: str) -> None:
    """It imports them, or a helper that does, or runs on ranks. No other module brings them in."""
    own = _loads(f"tests.{name}")
    if "tests.ranks" in own:
        return
    named = own.union(*(_loads(each) for each in own if each.startswith("tests.")))
    loaded = _closure([f"tests.{name}"], _loads)
    watched = {"torchrec", "fbgemm_gpu", "subprocess", "multiprocessing"}
    assert not watched & {each.split(".")[0] for each in loaded} - {each.split(".")[0] for each in named}


def _tests_of(name: str) -> list[str]:
    """Return the test files that a module's name leads to."""
    return own_tests(
        f"delta_tracker/{name.replace('.', '/')}.py", {f"tests/{each.replace('.', '/')}.py" for each in _TESTS}
    )


def test_a_module_has_a_test_file_of_its_name_or_is_imported_by_one_that_has() -> None:
    def imported(name: str) -> frozenset[str]:
        return _imports(_FILES[name]) if name in _FILES else frozenset()

    named = [f"delta_tracker.{name}" for name in _MODULES if _tests_of(name)]
    reached = _closure([*named, *(f"tests.{name}" for name in _TESTS)], imported)
    unreached = {name for name in _MODULES if f"delta_tracker.{name}" not in reached}
    assert {name for name in unreached if not name.endswith(".__main__")} == set()


def test_no_modules_import_each_other() -> None:
    imports = {name: _imports(path) for name, path in _MODULES.items()}
    graph = TopologicalSorter({f"delta_tracker.{name}": found for name, found in imports.items()})
    assert list(graph.static_order())  # raises CycleError


def test_no_two_files_share_a_name() -> None:
    """A traceback, or the tab of an editor, says which file it means."""
    names = Counter(path.name for path in _MODULES.values())
    assert not [name for name, count in names.items() if count > 1]


def test_each_package_says_which_file_to_open_first() -> None:
    for path in _PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        named = [name for name in re.findall(r"``([a-z_]+\.py)``", text) if path.parent != _PACKAGE]
        missing = [name for name in named if not (path.parent / name).exists()]
        assert not missing, path
        assert path.parent == _PACKAGE or (named and re.search(r" first\b|^Start with ``", text, re.MULTILINE)), path


def test_package_files_only_gather_names() -> None:
    lazy = {_PACKAGE / "__init__.py", _PACKAGE / "monitor" / "__init__.py"}  # some of their modules import torch
    for path in set(_PACKAGE.rglob("__init__.py")) - lazy:
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body), path


@pytest.mark.parametrize("name", delta_tracker.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(delta_tracker, name).__doc__ or "")


def test_public_names_are_found_in_their_homes() -> None:
    assert sorted(delta_tracker._HOMES) == sorted(delta_tracker.__all__)
    assert set(delta_tracker.__all__) <= set(dir(delta_tracker))
    for name, home in delta_tracker._HOMES.items():
        assert getattr(delta_tracker, name).__module__ == home
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        delta_tracker.nothing  # noqa: B018


def _tracker_names() -> set[str]:
    """Return the public names of ``ModelDeltaTracker``, with the attributes that its constructor sets."""
    tree = ast.parse(_MODULES["tracker.tracker"].read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelDeltaTracker")
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif node in found.body and isinstance(node, ast.Assign):
            names.update(ast.unparse(each) for each in node.targets)
    return {name for name in names if not name.startswith("_")}


def test_the_tracker_has_only_names_that_a_user_needs() -> None:
    """No name that the other packages call is missing in all documents, examples and benchmarks."""
    names = _tracker_names()
    assert len(names) <= 50
    called = {
        node.attr
        for name, path in _MODULES.items()
        if not name.startswith("tracker.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.search(r"(^|[._])tracker$", ast.unparse(node.value))
    }
    shown = [*_ROOT.glob("*.md"), *_PACKAGE.rglob("*.md"), *(_ROOT / "examples").rglob("*.py")]
    shown += (_ROOT / "benchmarks").rglob("*.py")
    assert names & called <= {name for path in shown for name in re.findall(r"[.`](\w+)", path.read_text())}


def _fields(node: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares, and the attributes that its methods set."""
    declared = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return declared | {
        each.attr for each in attributes if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def test_a_class_has_at_most_14_fields_and_30_methods() -> None:
    """Except the tracker's methods, and two records, whose fields are those of a JSON object in FORMAT.md."""
    large = set()
    for path in _MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                if len(_fields(node)) > 14:
                    large.add(f"fields of {node.name}")
                if sum(isinstance(each, ast.FunctionDef) for each in node.body) > 30:
                    large.add(f"methods of {node.name}")
    assert large == {"methods of ModelDeltaTracker", "fields of Manifest", "fields of Heartbeat"}
