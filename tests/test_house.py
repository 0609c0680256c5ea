"""Rules of the package: import order, public names, and no heavy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import delta_tracker

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "delta_tracker"

# A file imports only from what stands above it.
_ORDER = [
    "errors",
    "process_group",
    "forking",
    "monitor.clock",
    "monitor.names",
    "monitor.buckets",
    "monitor.aggregate",
    "monitor.policy",
    "monitor.cell",
    "monitor.timer",
    "monitor.stat",
    "monitor.event",
    "monitor.span",
    "monitor.source",
    "monitor.registry",
    "monitor.events",
    "monitor.library",
    "monitor.batch",
    "monitor.sinks.sink",
    "monitor.containment",
    "monitor.outlet",
    "monitor.collector",
    "monitor.forks",
    "monitor.system",
    "monitor.monitor",
    "monitor.default",
    "monitor.panels",
    "monitor.report",
    "monitor.state",
    "monitor.nvml",
    "monitor.sinks.appended_file",
    "monitor.sinks.jsonl",
    "monitor.sinks.logs",
    "monitor.sinks.chrome_trace",
    "monitor.sinks.prometheus",
    "monitor.sinks.opentelemetry",
    "monitor.sinks.tensorboard",
    "monitor.sinks.mlflow",
    "monitor.sinks.torch_monitor",
    "monitor.device_state",
    "monitor.device",
    "monitor.classification",
    "monitor.torchmetric",
    "monitor.across_ranks",
    "monitor.syncs",
    "row_memory",
    "rows",
    "types",
    "kernels.rows",
    "kernels.torch",
    "kernels.numba_loops",
    "kernels.numba",
    "kernels.triton_programs",
    "kernels.triton",
    "kernels.engines",
    "store.segments",
    "store.shadow",
    "store.lookups",
    "cursors",
    "ages",
    "figures",
    "changes",
    "row_target",
    "sharding.versions",
    "sharding.discover",
    "sharding.refusals",
    "sharding.hooks",
    "sharding.weights",
    "sharding.writes",
    "sharding.inference",
    "capture",
    "selection",
    "reader",
    "recorder",
    "pending",
    "consumers",
    "checkpoint.part",
    "checkpoint.pack",
    "checkpoint.reshard",
    "checkpoint.counters",
    "checkpoint.gather",
    "checkpoint.stateful",
    "tracker",
    "checkpoint.dcp",
    "stream.address",
    "stream.files",
    "stream.interruption",
    "stream.storage",
    "stream.notify",
    "stream.redis",
    "stream.encoding",
    "stream.manifest",
    "stream.parse",
    "stream.codec",
    "stream.buffer",
    "stream.part",
    "stream.contents",
    "stream.log",
    "stream.retention",
    "stream.merging",
    "stream.compaction",
    "stream.upkeep",
    "stream.cursor",
    "stream.heartbeat",
    "stream.heartbeat_metrics",
    "stream.ranks",
    "stream.writer",
    "sharding.dense",
    "cadence",
    "status",
    "observing",
    "gather",
    "resume",
    "cutter",
    "publisher",
    "lightning",
    "placement",
    "targets",
    "table_lock",
    "applying",
    "gate",
    "follower",
    "predictor",
    "cli.text",
    "cli.output",
    "cli.command",
    "cli.entries",
    "cli.followers",
    "cli.survey",
    "cli.inspect",
    "cli.tail",
    "cli.verify",
    "cli.versions",
    "cli.diff",
    "cli.compact",
    "cli.export",
    "cli.watch",
    "cli.screen",
    "cli.top",
    "cli.history",
    "cli.movement",
    "cli.figures",
    "cli.charts",
    "cli.page",
    "cli.report",
    "cli.demo",
    "cli.commands",
    "cli.main",
    "cli.__main__",
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


def test_every_file_has_a_place_in_the_order() -> None:
    assert sorted(_ORDER) == sorted(_MODULES)


@pytest.mark.parametrize("name", _ORDER)
def test_imports_run_one_way(name: str) -> None:
    above = {f"delta_tracker.{other}" for other in _ORDER[: _ORDER.index(name)]}
    ours = {module for module in _imports(_MODULES[name]) if module.split(".")[0] == "delta_tracker"}
    assert ours <= above


@pytest.mark.parametrize("name", [name for name in _ORDER if not name.startswith("sharding.")])
def test_only_sharding_knows_torchrec(name: str) -> None:
    assert not {module for module in _imports(_MODULES[name]) if module.split(".")[0] in ("torchrec", "fbgemm_gpu")}


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
