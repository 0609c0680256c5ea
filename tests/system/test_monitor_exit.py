"""Collected data is delivered at the end of a program, however it ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent.parent

_EXIT = """
import sys
from datetime import timedelta
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.sinks.jsonl import JsonlSink
monitor = Monitor()
loss = monitor.stat("loss", window=Window(count=100), aggregations=("sum",))
monitor.start([JsonlSink(sys.argv[1])], interval=timedelta(hours=1))
for _ in range(130):
    loss.add(1)
monitor.log("end", "bye")
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError('x')", "monitor.stop()"])
def test_the_last_window_is_delivered_at_the_end_of_the_program(tmp_path, end) -> None:
    path = tmp_path / "metrics.jsonl"
    program = [sys.executable, "-W", "ignore", "-c", _EXIT.format(end=end), str(path)]
    subprocess.run(program, check=False, timeout=240, cwd=_ROOT, stderr=subprocess.DEVNULL)
    text = path.read_text()
    lines = [line for line in text.splitlines() if '"loss"' in line and '"window"' in line]
    assert len(lines) == 2
    assert '"count": 100' in lines[0]
    assert '"count": 30' in lines[1]
    assert '"bye"' in text


_PROGRAM = """
import atexit, sys, threading
from datetime import timedelta
from delta_tracker.monitor import Monitor, Window
from delta_tracker.monitor.sinks.jsonl import JsonlSink

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

monitor = Monitor()
loss = monitor.stat("loss", window=Window(count=100), aggregations=("sum",))
monitor.start([JsonlSink(sys.argv[1])], interval=timedelta(hours=1), system=False)
for _ in range(130):
    loss.add(1)
if sys.argv[2] == "simulated":
    atexit.register(setattr, threading.Thread, "start", refuse)
"""


def _runs(python: str) -> bool:
    code = "import sys; sys.exit(not sys.version_info >= (3, 12))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("python", ["simulated", *filter(shutil.which, ["python3.12", "python3.13", "python3.14"])])
def test_a_program_that_ends_before_its_first_interval_delivers(tmp_path: Path, python: str) -> None:
    """The monitor has no dependencies, so newer Pythons without the library's dependencies can run it."""
    if python != "simulated" and not _runs(python):
        pytest.skip(f"{python} starts another Python, or none")
    path = tmp_path / "lines"
    program = [sys.executable if python == "simulated" else python, "-c", _PROGRAM, str(path), python]
    subprocess.run(program, check=True, timeout=240, cwd=_ROOT)
    lines = [line for line in path.read_text().splitlines() if '"loss"' in line and '"window"' in line]
    assert len(lines) == 2
    assert '"count": 30' in lines[1]
