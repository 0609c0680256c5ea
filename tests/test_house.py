"""Rules of the package: import order, public names, and no heavy imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import delta_tracker

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "delta_tracker"

# A package imports from the lines before its own, and nothing else of its own line: ``tracker`` knows no ``predictor``.
_LAYERS = [
    ["errors", "types", "rows", "row_target"],
    ["buffers", "distributed", "forking"],
    ["monitor"],
    ["sharding", "stream"],
    ["tracker", "predictor"],
    ["publisher"],
    ["integrations", "cli"],
]
# These test TorchRec's modules, or compare with FBGEMM's bytes.
_TESTS_OF_TORCHREC = {"predictor.test_quantised", "predictor.test_targets", "stream.test_encoding"}
# What these test is a program, a fork, a signal, the end of a process, or a server.
_TESTS_OF_PROCESSES = {
    *("cli.test_cli", "cli.test_cli_versions", "cli.test_top", "predictor.test_forking"),
    *("monitor.test_deliveries", "monitor.test_events", "monitor.test_forks", "monitor.test_safety"),
    *("contract.test_notify", "contract.test_storage", "stream.test_s3"),
    "stream.test_fuzz",  # its memory is capped
    # what is imported, which only a new process shows
    *("contract.test_row_sets", "monitor.test_bridges", "monitor.test_recorder", "monitor.test_sinks"),
    *("predictor.test_predictor", "predictor.test_targets", "test_house", "test_readme", "test_reverts"),
}
_RANKS = {"one_rank", "two_ranks", "four_ranks"}  # fixtures: who asks for them tests TorchRec

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


def _outside_functions(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from _outside_functions(getattr(node, field, []))


@cache
def _loads(name: str) -> frozenset[str]:
    """Return the names that a module of ours imports when it is imported, with those of the packages above it."""
    found = {name.rpartition(".")[0]} - {""}
    for node in _outside_functions(ast.parse(_FILES[name].read_text()).body) if name in _FILES else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            homes = delta_tracker._HOMES if node.module == "delta_tracker" else {}
            found |= {node.module or "", *(homes.get(each, f"{node.module}.{each}") for each in names)}
    return frozenset(found)


def _all_loads(name: str) -> set[str]:
    """Return all modules that a test file brings with it."""
    found, waiting = {name}, [name]
    while waiting:
        new = _loads(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def _tests_on_ranks(name: str) -> bool:
    """Return whether a test of the file asks for ranks."""
    functions = [node for node in ast.walk(ast.parse(_FILES[name].read_text())) if isinstance(node, ast.FunctionDef)]
    return any(argument.arg in _RANKS for function in functions for argument in function.args.args)


def _imports(path: Path) -> set[str]:
    """Names of the modules that a file imports, at the top or anywhere else."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_imports_run_one_way(name: str) -> None:
    own = name.partition(".")[0]
    layer = next(index for index, packages in enumerate(_LAYERS) if own in packages)
    allowed = {own}.union(*_LAYERS[: max(layer, 1)])
    ours = {module.split(".")[1] for module in _imports(_MODULES[name]) if module.startswith("delta_tracker.")}
    assert ours <= allowed


@pytest.mark.parametrize("name", [name for name in sorted(_MODULES) if not name.startswith("sharding.")])
def test_only_sharding_knows_torchrec(name: str) -> None:
    assert not {module for module in _imports(_MODULES[name]) if module.split(".")[0] in ("torchrec", "fbgemm_gpu")}


@pytest.mark.parametrize("name", [name for name in sorted(_MODULES) if not name.startswith("monitor.")])
def test_the_core_is_given_its_monitor(name: str) -> None:
    """Only the monitor's own modules know that of the program; the others get a recorder, which is bound to one."""
    names = {
        alias.name
        for node in ast.walk(ast.parse(_MODULES[name].read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("delta_tracker.monitor")
        for alias in node.names
    }
    assert not names & {"MONITOR", "metrics"}


@pytest.mark.parametrize("name", [name for name in _TESTS if name.partition(".")[0] not in ("system", "integrations")])
def test_only_tests_of_torchrec_import_it_or_start_processes(name: str) -> None:
    if _tests_on_ranks(f"tests.{name}"):
        return
    loads = _all_loads(f"tests.{name}")
    assert (name in _TESTS_OF_TORCHREC) == bool({"torchrec", "fbgemm_gpu"} & {each.split(".")[0] for each in loads})
    ours = [_FILES[each].read_text() for each in loads if each.startswith("tests.") and each in _FILES]
    starts = {"subprocess", "multiprocessing"} & loads or any("os.fork()" in text for text in ours)
    assert (name in _TESTS_OF_PROCESSES) == bool(starts)


def test_no_modules_import_each_other() -> None:
    imports = {name: _imports(path) for name, path in _MODULES.items()}
    graph = TopologicalSorter({f"delta_tracker.{name}": found for name, found in imports.items()})
    assert graph.static_order()  # raises CycleError


def test_each_package_says_which_file_to_open_first() -> None:
    for path in _PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        named = [name for name in re.findall(r"``([a-z_]+\.py)``", text) if path.parent != _PACKAGE]
        missing = [name for name in named if not (path.parent / name).exists()]
        assert not missing, path
        assert path.parent == _PACKAGE or (named and " first" in text), path


def test_package_files_only_gather_names() -> None:
    for path in set(_PACKAGE.rglob("__init__.py")) - {_PACKAGE / "__init__.py"}:  # that one imports them when asked
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body), path


def test_the_public_names() -> None:
    assert delta_tracker.__all__ == [
        "Cadence",
        "Delta",
        "DeltaRows",
        "DeltaStore",
        "EmbdUpdateMode",
        "Encoding",
        "Gate",
        "IndexedLookup",
        "Memory",
        "ModelDeltaTracker",
        "Predictor",
        "Publisher",
        "Retention",
        "RowTarget",
        "ShardSpec",
        "Storage",
        "TableSpec",
        "TopK",
        "TrackingMode",
    ]
    assert all(getattr(delta_tracker, name).__doc__ for name in delta_tracker.__all__)


def test_public_names_are_imported_when_they_are_used() -> None:
    program = """
import sys
import delta_tracker
assert not [name for name in sys.modules if name.startswith("delta_tracker.")]
assert delta_tracker.errors.StorageError and delta_tracker.monitor.MONITOR
from delta_tracker import *
assert Predictor is delta_tracker.Predictor
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120, cwd=_ROOT)
    assert sorted(delta_tracker._HOMES) == sorted(delta_tracker.__all__)
    assert set(delta_tracker.__all__) <= set(dir(delta_tracker))
    for name, home in delta_tracker._HOMES.items():
        assert getattr(delta_tracker, name).__module__ == home
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        delta_tracker.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy_and_starts_nothing() -> None:
    program = """
import sys, threading
from delta_tracker import *
optional = {"torchrec", "fbgemm_gpu", "numba", "matplotlib", "click", "rich", "pyarrow", "safetensors"}
optional.add("delta_tracker.cli")
heavy = optional & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120, cwd=_ROOT)
