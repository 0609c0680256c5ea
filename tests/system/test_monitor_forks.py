"""Forks of a recording program: no child hangs, and no child exposes or writes its parent's data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest

from delta_tracker.monitor import Monitor
from delta_tracker.monitor.sinks.prometheus import PrometheusSink
from tests import forked
from tests.monitor.figures import total
from tests.monitor.recording import Kept

_ROOT = Path(__file__).parent.parent.parent


def test_no_child_hangs_or_writes_its_parents_data(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    program = [sys.executable, "-W", "ignore", "-m", "tests.monitor.forking", str(tmp_path), "100"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, cwd=_ROOT, check=False)
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


def _in_child(body) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_begins_empty_and_can_start_again() -> None:
    monitor = Monitor()
    sink = Kept()
    stat = monitor.counter("c")
    stat.add(5)
    monitor.log("parent")
    monitor.start([sink], interval=timedelta(hours=1), system=False)

    def child() -> None:
        assert not monitor.is_running
        assert not monitor.events.take()
        assert total(monitor, "c") == 0
        stat.add(1)
        own = Kept()
        monitor.start([own], interval=timedelta(hours=1), system=False)
        assert monitor.stop()
        assert own.windows("c")[0].values == {"sum": 1}
        assert sink.was_forgotten
        assert not sink.is_closed
        assert not sink.collections

    assert _in_child(child) == 0
    assert not sink.was_forgotten
    stat.add(1)
    assert monitor.stop()
    assert sink.windows("c")[0].values == {"sum": 6}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_waits_for_no_lock_that_a_thread_of_the_parent_holds() -> None:
    monitor = Monitor()
    stat = monitor.stat("s", labels=["k"])
    cell = stat.cell(k=1)
    monitor.start([Kept()], interval=timedelta(hours=1), system=False)
    locks = [monitor.registry._lock, stat._lock, cell._lock, monitor._collector._lock]
    held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        may_go.wait(120)
        for lock in locks:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)

    def child() -> None:
        signal.alarm(60)  # ends a child that waits
        for _ in range(2000):
            cell.add(1)
        stat.cell(k=2).add(1)
        monitor.configure("s", raw=2)
        monitor.counter("new").add(1)
        assert total(monitor, "s") == 2001

    try:
        assert _in_child(child) == 0
    finally:
        may_go.set()
        holder.join()
    assert monitor.stop()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forks_while_threads_record_and_fold() -> None:
    """A child inherits locks that are never released; it must not wait for them."""
    monitor = Monitor()
    stat = monitor.histogram("s")
    cells = monitor.counter("labeled", labels=["k"], max_cells=16)
    monitor.start([Kept()], interval=timedelta(milliseconds=1), system=False)
    stop = threading.Event()
    counts = [0] * 4

    def record(place: int) -> None:
        while not stop.is_set():
            for _ in range(1000):
                stat.add(1)
                counts[place] += 1
            cells.cell(k=counts[place] % 100).add(1)
            monitor.log("a")

    threads = [threading.Thread(target=record, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()

    def child() -> None:
        for _ in range(3000):
            stat.add(1)
            cells.cell(k=_).add(1)
        monitor.log("b")
        monitor.configure("s", raw=1)
        assert total(monitor, "s") == 3000
        assert total(monitor, "labeled") == 3000

    try:
        for _ in range(12):
            assert _in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert monitor.stop()
    assert total(monitor, "s") == sum(counts)


_FORKING = """
import os
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.recorder import Recorder
from tests.monitor.test_recorder import Owner, labels

monitor, owner = Monitor(), Owner()
recorder = Recorder("predictor", owner, monitor=monitor)
recorder.watch(lambda _: recorder.predictor_lag_versions.set(2))
applied = recorder.applied_versions.cell(kind="delta")
applied.add(5)
assert ("predictor_lag_versions", ("predictor",)) in labels(monitor)
child = os.fork()
if child == 0:
    applied.add(1)
    is_right = labels(monitor) == {("applied_versions", ("predictor", "delta"))} and applied.collect_total() == 1
    os._exit(0 if is_right else 1)
assert os.waitpid(child, 0)[1] == 0
assert applied.collect_total() == 5
"""


def test_a_forked_child_records_its_own_and_shows_no_gauges_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_FORKING)
    done = forked.run(str(tmp_path / "program.py"), timeout_seconds=240)
    assert done.returncode == 0, done.stderr


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_the_endpoint_to_the_parent() -> None:
    pytest.importorskip("prometheus_client")
    monitor = Monitor()
    sink = PrometheusSink(port=0)
    monitor.counter("c").add(1)
    monitor.start([sink], system=False)
    monitor.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if sink._server.socket.fileno() == -1 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "c_total 1.0" in _scrape(sink.port)
    monitor.stop()
