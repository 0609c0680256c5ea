"""Forks of a program whose collector is busy: no child hangs, and no line is written twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
_ROOT = Path(__file__).parent.parent.parent


def test_no_child_hangs_and_none_writes_for_its_parent(tmp_path: Path) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.monitor.forking", str(tmp_path), "100"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=90, cwd=_ROOT, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["hung"], figures["failed"], figures["forked"]) == (0, 0, 100)
    assert figures["stopped"]
    assert "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    records = [line["values"]["sum"] for line in lines if line["kind"] == "window" and line["name"] == "records"]
    assert sum(records) == figures["records"]
    events = [line["id"] for line in lines if line["kind"] == "event"]
    assert len(events) == len(set(events)) > 0
    trace = json.loads((tmp_path / "trace").read_text())
    marks = [(each["id"], each["ph"]) for each in trace if each.get("ph") in ("b", "e")]
    assert len(marks) == len(set(marks)) > 0
