"""The recorder of traces: what it keeps of a test and of a world, and which differences it names."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.traces.compare import FORMS, report, stable

_TEST = "tests/predictor/test_unreadable.py::test_an_outage_is_no_reason_to_resync"


def test_a_test_and_a_world_have_traces_that_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "traces.json.gz"
    arguments = ["record", str(file), _TEST, "--runs", "1", "--worlds", "1"]
    done = forked.run("tests.traces", *arguments, timeout_seconds=240)
    assert done.returncode == 0, done.stderr
    traces = json.loads(gzip.decompress(file.read_bytes()))
    assert traces.keys() == {_TEST, "world 0"}
    calls = traces[_TEST]["Predictor 1"]["calls"]
    events = [event for call in calls for event in call["events"]]
    assert calls[0]["call"] == "__init__"
    assert "read log/00000000000000000002.json of memory 1" in events
    assert "version 2" in events
    assert any(call.get("raises", "").startswith("StorageError url=memory://") for call in calls)
    assert calls[-1]["status"]["resyncs"] == 0
    assert any(name.startswith("Predictor") for name in traces["world 0"])
    *_, summary = report(traces, traces)
    assert summary.startswith("requests of complete readers: ")
    done = forked.run("tests.traces", "compare", str(file), str(file), timeout_seconds=60)
    assert done.stdout.splitlines()[0] == "2 traces: equal"


_CALL: dict[str, Any] = {
    "call": "sync",
    "events": ["read control/head.json of a", "read log/1 of a", "version 1", "read log/2 of a"],
    "result": 1,
    "status": {"version": 1, "resyncs": 0},
}


def _trace(change: Callable[[dict[str, Any]], object], versions: tuple[int, ...] = (1,)) -> dict[str, Any]:
    call = copy.deepcopy(_CALL)
    change(call)
    return {"Predictor 1": {"form": FORMS[0], "versions": list(versions), "calls": [call]}}


_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "fewer requests": lambda call: call["events"].pop(1),
    "more requests": lambda call: call["events"].append("names log of a"),
    "other requests": lambda call: call["events"].__setitem__(1, "size log/1 of a"),
    "order of requests": lambda call: call["events"].reverse(),
    "raises": lambda call: call.update(raises="StorageError url=a"),
    "result": lambda call: call.update(result=2),
    "status": lambda call: call["status"].update(resyncs=1),
    "calls": lambda call: call.update(call="wait"),
}


@pytest.mark.parametrize("kind", _CHANGES)
def test_the_first_difference_is_named(kind: str) -> None:
    lines = list(report({"test": _trace(dict)}, {"test": _trace(_CHANGES[kind])}))
    assert lines[0].startswith(f"test\n  {kind}: Predictor 1, call 1, sync\n")
    assert f"1 traces: {kind}" in lines


def test_a_new_field_of_a_status_is_no_difference() -> None:
    new = _trace(lambda call: call["status"].update(why="it is new"))
    assert next(iter(report({"test": _trace(dict)}, {"test": new}))) == "1 traces: equal"


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (dict, "complete"),
        (lambda call: call["events"].pop(0), "no control"),
        (lambda call: call["events"].pop(1), "no requests"),
        (lambda call: call["status"].update(resyncs=1), "versions"),
    ],
)
def test_a_reader_is_kept_as_far_as_all_runs_agree(change: Callable[[dict[str, Any]], object], form: str) -> None:
    assert stable([_trace(dict), _trace(dict), _trace(change)])["Predictor 1"]["form"] == form


def test_other_versions_are_unstable_or_a_difference() -> None:
    runs = [_trace(dict), _trace(dict, versions=(1, 2))]
    assert stable(runs)["Predictor 1"] == {"form": "unstable", "versions": [], "calls": []}
    lines = list(report({"test": runs[0]}, {"test": runs[1]}))
    assert lines[0] == "test\n  versions: Predictor 1\n  before: [1]\n  after:  [1, 2]"


def test_a_reader_that_is_missing_is_a_difference() -> None:
    lines = list(report({"test": _trace(dict)}, {"test": {}}))
    assert "1 traces: calls" in lines
