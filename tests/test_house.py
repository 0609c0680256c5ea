"""Rules of the package: import order, public names, no heavy imports, and where the tests are.

The tests of ``delta_tracker/PACKAGE/NAME.py`` are in ``tests/PACKAGE/test_NAME.py``, and those of a module directly in
``delta_tracker/`` in ``tests/test_NAME.py``. Two kinds of files test a whole subpackage
``delta_tracker/PACKAGE/FOLDER/``: ``tests/PACKAGE/test_FOLDER.py``, and ``tests/contract/test_FOLDER.py`` for what
every implementation has to pass. ``_TESTED_THROUGH`` names the file for each other module. Tests that start processes
are in ``tests/system/`` or ``tests/integrations/``, tests for a GPU in ``tests/gpu/``. Tests that follow the advice of
errors are in ``tests/advice/``. A test file that has no module's name tests a behavior of several.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import delta_tracker

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
        "row_sink",
        "raw_ids",
        "raw_id_index",
        "state_tree",
        "uncopied",
    ],
    ["buffers", "cuda_fence", "distributed", "forking", "host_copy"],
    ["monitor"],
    ["sharding", "stream"],
    ["sinks"],
    ["tracker", "predictor"],
    ["publisher", "compat"],
    ["recovery", "planning"],
    ["integrations", "cli"],
]

# These test TorchRec's modules or optimizers, or compare with FBGEMM's bytes.
_TESTS_OF_TORCHREC = {
    "recovery.test_preparation",
    "recovery.test_state_fit",
    "sharding.test_collision_states",
    "sharding.test_inference_tables",
    "sharding.test_prefetch_order",
    "sharding.test_presence",
    "sharding.test_raw_id_maps",
    "sharding.test_row_cache",
    "stream.test_encoding",
}

# Tests against real servers. Other tests that start processes are in system/.
_TESTS_OF_PROCESSES = {
    "advice.test_row_stores",
    "conformance.test_cpp_reader",
    "conformance.test_kit",
    "contract.test_host_cache",
    "contract.test_notify",
    "contract.test_row_sinks",
    "contract.test_storage",
    "sharding.test_pairs",
}
# Modules without a test file of their name, and the file whose tests fail if the module is broken.
_TESTED_THROUGH = {
    "cli.__main__": "system.test_command_line",
    "cli.stream_command": "cli.test_main",
    "cli.commands": "cli.test_main",
    "cli.entries": "cli.test_inspect",
    "cli.followers": "cli.test_inspect",
    "cli.output": "cli.test_inspect",
    "cli.sink_target": "cli.test_sink",
    "cli.termination": "system.test_command_line",
    "cli.survey": "cli.test_inspect",
    "cli.versions": "cli.test_export",
    "distributed": "publisher.test_publisher",
    "forking": "system.test_follower_forks",
    "integrations.dcp": "tracker.test_checkpoint",
    "monitor.batch": "monitor.test_stat",
    "monitor.clock": "monitor.test_stat",
    "monitor.default": "predictor.test_gauges",
    "predictor.apply": "predictor.test_predictor",
    "predictor.model_writer": "predictor.test_predictor",
    "predictor.raw_id_maps": "predictor.test_identities",
    "predictor.version_writer": "predictor.test_predictor",
    "publisher.coordinator": "publisher.test_publisher",
    "publisher.flight": "publisher.test_publisher",
    "publisher.heartbeats": "publisher.test_publisher",
    "publisher.row_gatherer": "publisher.test_publisher",
    "publisher.version_source": "publisher.test_publisher",
    "recovery.following": "recovery.test_standby",
    "recovery.job": "recovery.test_restore",
    "recovery.objects": "recovery.test_restore",
    "recovery.pending": "recovery.test_path",
    "recovery.row_writer": "recovery.test_restore",
    "recovery.serving_streams": "recovery.test_standby",
    "recovery.standby_gauges": "recovery.test_standby",
    "recovery.training_states": "recovery.test_restore",
    "sharding.dense": "publisher.test_publisher",
    "sharding.local_shard": "sharding.test_discover",
    "sharding.step_hook": "sharding.test_plain_tables",
    "sharding.torchrec_api": "tracker.test_tracker",
    "sharding.untraced": "sharding.test_kernel_hooks",
    "sharding.weights": "tracker.test_modes",
    **dict.fromkeys(
        (
            "sinks.lmdb",
            "sinks.lmdb_rows",
            "sinks.lmdb_store",
            "sinks.lookup",
            "sinks.redis",
            "sinks.redis_rows",
            "sinks.redis_server",
            "sinks.stored_values",
        ),
        "contract.test_row_sinks",
    ),
    "stream.cached_storage": "stream.test_host_cache",
    "stream.claimed": "recovery.test_standby",
    "stream.cursor": "predictor.test_resync",
    "stream.doubted_storage": "predictor.test_settling",
    "stream.entry_names": "stream.test_log_index",
    "stream.format.block_rows": "stream.test_part_reader",
    "stream.format.contents": "predictor.test_gate",
    "stream.format.field_types": "stream.test_parse",
    "stream.format.part_writer": "stream.test_part_reader",
    "stream.format.shard_rows": "recovery.test_fit",
    "stream.maintenance.merging": "stream.test_compaction",
    "tracker.consumer_handle": "publisher.test_publisher",
    "tracker.delta_reader": "tracker.test_tracker",
    "tracker.log_state": "tracker.test_checkpoint",
    "tracker.lookup_recorder": "tracker.test_seed_interface",
    "tracker.store.make_store": "tracker.test_tracker",
    "tracker.tracked_model": "tracker.test_tracker",
}
_RANKS = {"one_rank", "two_ranks", "four_ranks"}  # fixtures of tests that use TorchRec

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
    """Return the modules that one of our modules loads at import, including those of its parent packages."""
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
    """Return all modules that a test file loads, directly or indirectly."""
    found, waiting = {name}, [name]
    while waiting:
        new = _loads(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def _tests_on_ranks(name: str) -> bool:
    """Return whether a test of the file uses ranks."""
    functions = [node for node in ast.walk(ast.parse(_FILES[name].read_text())) if isinstance(node, ast.FunctionDef)]
    return any(argument.arg in _RANKS for function in functions for argument in function.args.args)


def _forks(name: str) -> bool:
    """Return whether a module of the tests calls ``os.fork``."""
    nodes = ast.walk(ast.parse(_FILES[name].read_text())) if name in _FILES and name.startswith("tests.") else ()
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == "os.fork" for node in nodes)


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere."""
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
    """Only the monitor's modules use the default monitor; the others get a recorder, which is bound to a monitor."""
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
    starts = {"subprocess", "multiprocessing"} & loads or any(map(_forks, loads))
    assert (name in _TESTS_OF_PROCESSES) == bool(starts)


def _tests_of(name: str) -> set[str]:
    """Return the test files that a module's name leads to."""
    *packages, stem = name.split(".")
    names = [stem, *packages[1:]]
    found = {".".join([*packages[:1], f"test_{each}"]) for each in names} | {f"contract.test_{each}" for each in names}
    return found & set(_TESTS)


@pytest.mark.parametrize("name", sorted(_MODULES))
def test_the_tests_of_a_module_are_found_by_its_name(name: str) -> None:
    assert bool(_tests_of(name)) != (name in _TESTED_THROUGH)


def test_modules_that_are_tested_through_others_exist_and_so_do_their_tests() -> None:
    assert _TESTED_THROUGH.keys() <= _MODULES.keys()
    assert set(_TESTED_THROUGH.values()) <= set(_TESTS)


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
        assert path.parent == _PACKAGE or (named and re.search(r" first\b|^Start with ``", text, re.MULTILINE)), path


def test_package_files_only_gather_names() -> None:
    for path in set(_PACKAGE.rglob("__init__.py")) - {_PACKAGE / "__init__.py"}:  # imports names lazily
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body), path


@pytest.mark.parametrize("name", delta_tracker.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(delta_tracker, name).__doc__ or "")


def test_the_public_names() -> None:
    assert delta_tracker.__all__ == [
        "Cadence",
        "Canary",
        "DataPosition",
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
        "RandomStates",
        "RankCounters",
        "RawIdIndex",
        "Retention",
        "RowSink",
        "RowTarget",
        "ShardSpec",
        "Standby",
        "Storage",
        "TableSpec",
        "Takeover",
        "TopK",
        "TrackingMode",
        "restore",
    ]
    assert all(getattr(delta_tracker, name).__doc__ for name in delta_tracker.__all__)


def test_public_names_are_found_in_their_homes() -> None:
    assert sorted(delta_tracker._HOMES) == sorted(delta_tracker.__all__)
    assert set(delta_tracker.__all__) <= set(dir(delta_tracker))
    for name, home in delta_tracker._HOMES.items():
        assert getattr(delta_tracker, name).__module__ == home
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        delta_tracker.nothing  # noqa: B018
