"""Kills or fails every system call of stream writes with strace: ``python -m tests.system.syscall_sweep``.

The parent imports everything and uses no store, so that it can fork. Each point is a child that prepares a stream,
waits until strace is attached, and runs one operation. A dry run lists the system calls on the stream's files; each is
then killed on entry, or fails with an error. Afterwards another child checks the stream: readers see only complete
versions, no committed version is lost, and a new publisher continues. Prints the number of points by scenario as JSON.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from delta_tracker import Predictor
from delta_tracker.errors import DeltaTrackerError, NoSnapshotError
from delta_tracker.stream.heartbeat import Heartbeat, write_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.heartbeats import read_heartbeats
from tests.stream.streams import Writer

_CALLS = {
    "write": ("EIO", "ENOSPC"),
    "fsync": ("EIO", "ENOSPC"),
    "link": ("EIO", "ENOSPC", "EACCES"),
    "linkat": ("EIO", "ENOSPC", "EACCES"),
    "rename": ("EIO", "ENOSPC", "EACCES"),
    "unlink": ("EIO", "EACCES"),
    "mkdir": ("EIO", "ENOSPC", "EACCES"),
    "openat": ("EIO", "ENOSPC", "EACCES"),
    "fallocate": ("EIO", "ENOSPC"),
}
_SECONDS = 60.0
_ATTEMPTS = 5  # a fault ends after one attempt, but each thread that lists a directory counts its calls separately
_LINE = re.compile(r"(\d+) +(\w+)\(")


class Stage:
    """A stream that is being written, and a reader's state after each version."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}/stream"
        self.root = root
        self.states: dict[int, torch.Tensor] = {}
        self.writer: Writer
        self.action: Callable[[], object]

    def start(self) -> None:
        """Claim, and publish a snapshot and deltas without fsync, which only the swept operation needs."""
        self.writer = Writer(Storage(self.url, create=True, fsync=False))
        self.commit("snapshot", None)
        for row in range(3):
            self.commit("delta", [row])

    def commit(self, kind: str, ids: list[int] | None) -> None:
        self.prepare(kind, ids)
        self.action()

    def prepare(self, kind: str, ids: list[int] | None) -> None:
        """Change rows; the action publishes them."""
        if ids is not None:
            self.writer.table[ids] = torch.randn(len(ids), self.writer.spec.dim)
        self.states[self.writer.claim.head.version + 1] = self.writer.table.clone()
        rows = [self.writer.rows(ids)]
        self.action = lambda: self.writer.write(kind, rows)  # type: ignore[arg-type]

    def arm(self) -> None:
        """Make the publisher use fsync for later writes."""
        self.writer.storage = self.writer.claim._log.storage = Storage(self.url)


def _claim(stage: Stage) -> None:
    def claim() -> None:
        storage = Storage(stage.url, create=True)
        storage.probe()
        StreamLog(storage).claim()

    stage.action = claim


def _second_claim(stage: Stage) -> None:
    stage.start()
    _claim(stage)


def _publish(stage: Stage, kind: str, ids: list[int] | None) -> None:
    stage.start()
    stage.arm()
    stage.prepare(kind, ids)


def _compaction(stage: Stage, fold: float) -> None:
    stage.start()
    stage.action = lambda: compact(Storage(stage.url), fold=fold)


def _retention(stage: Stage) -> None:
    stage.start()
    compact(stage.writer.storage, fold=10.0)
    stage.commit("snapshot", None)
    stage.action = lambda: retain(Storage(stage.url), Retention(versions=1, grace_seconds=0.0))


def _heartbeat(stage: Stage) -> None:
    stage.start()
    beat = Heartbeat(
        name="p", time=1.0, stream=None, version=None, lag_versions=None, lag_seconds=None, resyncs=0, error=None
    )
    stage.action = lambda: write_heartbeat(Storage(stage.url), beat)
    stage.action()


def _read_through_cache(root: Path) -> torch.Tensor:
    """Return the newest rows, read through the host cache."""
    table = torch.full((20, 4), -1.0)
    Predictor({"ec.embeddings.t": table}, f"file://{root}/stream", cache=root / "stream-cache").sync()
    return table


def _host_cache(stage: Stage) -> None:
    stage.start()
    (stage.root / "stream-cache").mkdir(mode=0o700)

    def read() -> None:
        assert torch.equal(_read_through_cache(stage.root), stage.writer.table)

    stage.action = read


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "claim": _claim,
    "second claim": _second_claim,
    "delta": partial(_publish, kind="delta", ids=[3, 4]),
    "snapshot": partial(_publish, kind="snapshot", ids=None),
    "compaction": partial(_compaction, fold=10.0),
    "fold": partial(_compaction, fold=1e-9),
    "retention": _retention,
    "heartbeat": _heartbeat,
    "host cache": _host_cache,
}


@dataclass(frozen=True)
class Point:
    """The ``number``-th call of ``call`` in a scenario and its fault: ``KILL`` or an error's name."""

    scenario: str
    call: str
    number: int
    fault: str

    @property
    def injection(self) -> str:
        kind = "signal" if self.fault == "KILL" else "error"
        return f"inject={self.call}:{kind}={self.fault}:when={self.number}"


def _act(root: Path, scenario: str, wait: Callable[[], None]) -> None:
    """Prepare a scenario, wait for strace, run it, and retry after an error."""
    stage = Stage(root)
    SCENARIOS[scenario](stage)
    torch.save(stage.states, root / "states.pt")
    (root / "modules.json").write_text(json.dumps(sorted(sys.modules)))
    wait()
    outcome = "done"
    for _ in range(_ATTEMPTS):
        try:
            stage.action()
        except DeltaTrackerError as error:  # a host cache that cannot be used is an InvalidArgumentError
            outcome = type(error).__name__
        else:
            (root / "outcome").write_text(outcome)
            return
    raise AssertionError(f"it fails {_ATTEMPTS} times, with {outcome}")


def _check(root: Path) -> None:
    """Check that the stream is complete and that a new publisher continues."""
    storage = Storage(f"file://{root}/stream", create=True)
    states: dict[int, torch.Tensor] = torch.load(root / "states.pt")
    is_done = (root / "outcome").exists()
    committed = max(states, default=0) - (not is_done and not (root / "is_upkeep").exists())
    table = torch.full((20, 4), -1.0)
    model = {"ec.embeddings.t": table}
    predictor = Predictor(model, storage)
    try:
        version = predictor.sync()
    except NoSnapshotError:
        assert not states, "committed versions are lost"
    else:
        assert version >= committed, f"version {committed} is lost: {version}"
        held = states[max(each for each in states if each <= version)]
        assert torch.equal(table.view(torch.int32), held.view(torch.int32)), f"not version {version}"
        if (root / "stream-cache").exists():
            assert torch.equal(_read_through_cache(root), held)
    read_heartbeats(storage)
    writer = Writer(storage)
    writer.table.normal_()
    for publish in (writer.snapshot, lambda: writer.delta([1, 2])):
        publish()
        assert predictor.sync() == writer.claim.head.version
        assert torch.equal(table, writer.table)
    compact(storage, fold=1e-9)
    retain(storage, Retention(versions=1, grace_seconds=0.0))
    late = torch.full((20, 4), -1.0)
    Predictor({"ec.embeddings.t": late}, storage).sync()
    assert torch.equal(late, writer.table)


def _fork(root: Path, body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(_SECONDS))
            torch.set_num_threads(1)
            body()
            status = 0
        except BaseException:  # noqa: BLE001  it goes to the parent
            (root / "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    return child


@contextlib.contextmanager
def _traced(pid: int, log: Path, options: Sequence[str]) -> Iterator[None]:
    """Run strace on a process; it ends with the block."""
    command = ["strace", "-f", "-y", "-s", "8", "-p", str(pid), "-o", str(log), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        first = strace.stderr.readline()
        if "attached" not in first:
            raise RuntimeError(f"strace cannot attach: {first}")
        yield
        try:
            strace.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            strace.kill()
            raise


def run_traced(root: Path, body: Callable[[Callable[[], None]], None], options: Sequence[str]) -> int:
    """Run ``body`` in a child; return its exit status, negative for a signal.

    Args:
        root: directory for the trace ``strace`` and, after an exception, its text ``error``.
        body: called with a function that waits until strace is attached; the body calls it once.
        options: strace's options.
    """
    ready, told = os.pipe()
    wait, go = os.pipe()

    def attached() -> None:
        os.write(told, b"x")
        os.read(wait, 1)

    child = _fork(root, partial(body, attached))
    os.close(told)
    try:
        if not os.read(ready, 1):
            raise AssertionError((root / "error").read_text())
        with _traced(child, root / "strace", options):
            os.write(go, b"x")
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for descriptor in (ready, wait, go):
            os.close(descriptor)
    return status


def _run(root: Path, scenario: str, options: Sequence[str]) -> int:
    """Run a scenario in a child under strace; return its exit status, negative for a signal."""
    root.mkdir()
    return run_traced(root, partial(_act, root, scenario), options)


def points(root: Path, scenario: str, faults: Sequence[str]) -> list[Point]:
    """Return the calls of a scenario on its stream's files, with each fault, found by two dry runs."""
    trace = [f"--trace={','.join(_CALLS)}"]
    for turn in ("first", "second"):  # the first run loads modules
        place = root / f"{scenario} {turn}"
        assert _run(place, scenario, trace) == 0, (place / "error").read_text()
        for module in json.loads((place / "modules.json").read_text()):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    found = []
    for line in (place / "strace").read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call = match[1], match[2]
        counts[thread, call] += 1
        if f"{place}/stream" in line:
            found += [
                Point(scenario, call, counts[thread, call], fault)
                for fault in ("KILL", *_CALLS[call])
                if fault in faults
            ]
    assert found, scenario
    return list(dict.fromkeys(found))


def _visit(root: Path, point: Point) -> str:
    """Visit a point; return how it ended: killed, done, or the name of the error."""
    status = _run(root, point.scenario, [f"--trace={','.join(_CALLS)}", "-e", point.injection])
    if point.scenario not in ("delta", "snapshot"):
        (root / "is_upkeep").touch()
    trace = (root / "strace").read_text()
    is_killed = status == -signal.SIGKILL
    if not is_killed and (status != 0 or "INJECTED" not in trace):
        error = root / "error"
        raise AssertionError(f"{point} ended with {status}\n{error.read_text() if error.exists() else trace[-2000:]}")
    assert is_killed == (point.fault == "KILL"), point
    check = _fork(root, partial(_check, root))
    if os.waitstatus_to_exitcode(os.waitpid(check, 0)[1]) != 0:
        raise AssertionError(f"after {point}: {(root / 'error').read_text()}\n{trace[-2000:]}")
    return "killed" if is_killed else (root / "outcome").read_text()


def sweep(root: Path, scenarios: Sequence[str], faults: Sequence[str]) -> dict[str, Any]:
    """Visit all points; return their number by scenario, and how they ended.

    Raises:
        AssertionError: at the first point that violates a promise.
    """
    counts: dict[str, int] = {}
    outcomes: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    for scenario in scenarios:
        all_points = points(root, scenario, faults)
        counts[scenario] = len(all_points)
        for number, point in enumerate(all_points):
            place = root / f"{scenario} {number}"
            outcomes[_visit(place, point)] += 1
            shutil.rmtree(place)
    return {"points": counts, "outcomes": dict(outcomes), "seconds": round(time.monotonic() - begin, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--faults", nargs="+", default=["KILL", "EIO", "ENOSPC", "EACCES"])
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sweep-") as root:
        print(json.dumps(sweep(Path(root), options.scenarios or list(SCENARIOS), options.faults)))


if __name__ == "__main__":
    sys.exit(main())
