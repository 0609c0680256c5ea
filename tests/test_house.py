"""Rules of the package: import order, public names, and no heavy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
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
_MODULES = {
    ".".join(path.relative_to(_PACKAGE).with_suffix("").parts): path
    for path in sorted(_PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


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


def test_no_modules_import_each_other() -> None:
    imports = {name: _imports(path) for name, path in _MODULES.items()}
    graph = TopologicalSorter({f"delta_tracker.{name}": found for name, found in imports.items()})
    assert graph.static_order()  # raises CycleError


def test_each_package_says_which_file_to_open_first() -> None:
    for path in _PACKAGE.rglob("__init__.py"):
        assert len(ast.get_docstring(ast.parse(path.read_text())) or "") > 50, path


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
