"""Public names: those of the guide exist, those of documents and examples are promised, and none disappears."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import delta_tracker
from delta_tracker import compat, errors, monitor
from tests.documents import DOCUMENTS, GUIDE, ROOT
from tests.releases.jobs import Jobs
from tests.releases.release import previous_release

_PAGE = GUIDE / "upgrade.md"
# Modules all of whose names are promised.
_WHOLE = {
    "delta_tracker": set(delta_tracker.__all__) | {"errors", "monitor"},
    "delta_tracker.errors": {name for name, each in vars(errors).items() if isinstance(each, type)},
    "delta_tracker.monitor": {name for name in vars(monitor) if not name.startswith("_")},
    "delta_tracker.compat": set(compat.__all__),
}
# Used by an example to show what is inside; not promised.
_SHOWN = {
    "delta_tracker.monitor.collection_report.CollectionReport",
    "delta_tracker.sharding.raw_id_maps.raw_id_maps",
    "delta_tracker.tracker.row_sets.numba.load_loops",
}
# Removed before the first release, without a warning.
_REMOVED = {
    "Delta.kept",
    "Predictor.after_fork_in_child",
    "Predictor.after_fork_in_parent",
    "Predictor.before_fork",
    "Retention.heartbeat_seconds",
    "Retention(heartbeat_seconds)",
    "Retention.orphan_seconds",
    "Retention(orphan_seconds)",
    "RawIdIndex.adopt",
    "RawIdIndex.adopt(identity)",
    "RowSink.settle",
    "RowSink.settle(state)",
    "Upkeep.has_passes",
    "delta-tracker demo --every",
    "delta-tracker demo --json",
    "delta-tracker demo --out",
    "delta-tracker demo --seconds",
    "delta-tracker export --format",
    "delta-tracker fleet --remove",
}


def _promised() -> set[str]:
    """Return the full names in the table of the page, except for modules all of whose names are promised."""
    found = set()
    for module, cell in re.findall(r"^\| `(delta_tracker[\w.]*)` \| (.*) \|$", _PAGE.read_text(), flags=re.MULTILINE):
        if module not in _WHOLE:
            found |= {f"{module}.{name}" for name in re.findall(r"`([\w.]+)`", cell)}
    return found


def _used() -> Iterator[str]:
    """Yield the full names that documents for users and examples import or name."""
    pages = [path for path in DOCUMENTS if path.parent in (GUIDE, ROOT)]
    for path in [*pages, *sorted((ROOT / "examples").rglob("*.py"))]:
        text = path.read_text()
        for module, names in re.findall(
            r"^\s*from (delta_tracker[\w.]*) import (\([^)]*\)|[^\n#]*)", text, re.MULTILINE
        ):
            yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
        if path.parent == GUIDE and path != _PAGE:
            yield from re.findall(r"`(delta_tracker(?:\.\w+)+)(?:\(|`)", text)


def _is_promised(name: str, promised: set[str]) -> bool:
    module, _, last = name.rpartition(".")
    is_module = name in _WHOLE or any(each.startswith(f"{name}.") for each in promised)
    return is_module or name in promised or last in _WHOLE.get(module, ())


@pytest.mark.promise("names")
def test_the_names_of_the_page_exist() -> None:
    assert _promised()
    for name in _promised():
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


@pytest.mark.promise("names")
def test_the_names_that_users_are_shown_are_on_the_page() -> None:
    promised = _promised()
    sinks = {each.__name__ for name, each in vars(monitor).items() if name.endswith("Sink")}
    missing = {
        name
        for name in set(_used()) - _SHOWN
        if not _is_promised(name, promised)
        and not (name.startswith("delta_tracker.monitor.") and name.rpartition(".")[2] in sinks)
    }
    assert not missing


@pytest.mark.promise("names")
def test_no_name_of_the_previous_release_is_missing(tmp_path: Path) -> None:
    with previous_release(tmp_path) as old:
        gone = set(old.names()) - set(Jobs().names())
    assert {name for name in gone if not name.endswith("(self)")} == _REMOVED
