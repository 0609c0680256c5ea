"""``delta-tracker top``: what it shows, what it reads for that, and the terminal that it leaves."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from delta_tracker.cli import top as top_command
from delta_tracker.cli import watch as watch_module
from delta_tracker.cli.command import Stream
from delta_tracker.cli.main import main
from delta_tracker.cli.output import Output
from delta_tracker.cli.screen import screen
from delta_tracker.cli.watch import View, Watch
from delta_tracker.errors import StorageError
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN, Writer

_ROOT = Path(__file__).parents[2]
_EVIL = "[red]\x1b[31m\x1b[2J\r\nnext line\x9b1m\u202e"


class Counting(Storage):
    """A store that counts what is asked of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url, create=True, fsync=False)
        self.asked: Counter[str] = Counter()
        self.is_broken = False

    def read(self, name, **options):
        self.asked[name.split("/")[0]] += 1
        if self.is_broken:
            raise StorageError(self.url, "connection refused")
        return super().read(name, **options)

    def objects(self, prefix, **options):
        self.asked[f"list {prefix}"] += 1
        return super().objects(prefix, **options)

    def calls(self) -> dict[str, int]:
        """Since the last call of this."""
        asked, self.asked = self.asked, Counter()
        return dict(asked)


class Clock:
    """The time by which versions are committed, and the one of the checks for a gap."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_module, "time", clock)
    monkeypatch.setattr(watch_module, "time", clock)
    return clock


@pytest.fixture
def storage(tmp_path: Path) -> Counting:
    return Counting((tmp_path / "stream").as_uri())


def publish(writer: Writer, clock: Clock, count: int, seconds: float = 1.0) -> None:
    for number in range(count):
        clock.now += seconds
        writer.delta([number % 20, 19] if number % 20 != 19 else [19])


def test_a_refresh_reads_what_is_new_and_nothing_else(storage: Counting, clock: Clock) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 300, 0.5)
    watch = Watch(StreamLog(storage), window_seconds=20)
    storage.calls()
    watch.refresh(clock.now)
    # One listing finds the head; then downwards until the window is full: 100 entries are kept for the list.
    assert storage.calls() == {"list log": 1, "log": 100}
    assert len(watch.recent(clock.now)) == 40
    for _ in range(3):
        watch.refresh(clock.now)
        assert storage.calls() == {"log": 1}, "the name of the next version, and that is not there"
    publish(writer, clock, 3)
    storage.calls()
    watch.refresh(clock.now)
    assert storage.calls() == {"log": 4}
    assert watch.head == writer.claim.head
    clock.now += 11
    watch.refresh(clock.now)
    assert storage.calls() == {"log": 2, "list log": 1}, "now and then it looks whether the log goes on behind a gap"
    assert watch.starts == 1
    publish(writer, clock, 400, 0.5)
    for _ in range(3):
        watch.refresh(clock.now)
    assert len(watch.entries) == 100
    assert watch.head == writer.claim.head


def test_a_long_window_is_read_in_bounds(storage: Counting, clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_MAX_READS", 50)
    monkeypatch.setattr(watch_module, "_MIN_KEPT", 10)
    writer = Writer(storage)
    publish(writer, clock, 120, 0.01)
    watch = Watch(StreamLog(storage), window_seconds=86_400)
    storage.calls()
    watch.refresh(clock.now)
    assert storage.calls()["log"] <= 50
    assert watch.seconds(clock.now) == 1.0, "of the window it knows only the part that it has read"
    publish(writer, clock, 120, 0.01)
    storage.calls()
    watch.refresh(clock.now)
    assert storage.calls() == {"log": 50}
    for _ in range(3):
        watch.refresh(clock.now)
    assert watch.head == writer.claim.head


def test_the_rates_are_those_of_the_window(storage: Counting, clock: Clock) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 30, 2.0)
    clock.now += 5
    writer.snapshot()
    manifests = [StreamLog(storage).read(version) for version in range(1, 33)]
    inside = [each for each in manifests if each.created > clock.now - 20]
    assert len(inside) == 9
    view = View(storage.url, clock.now, Watch(StreamLog(storage), window_seconds=20))
    view.watch.refresh(clock.now)
    found = view.to_dict()
    assert found["window_seconds"] == 20
    assert found["versions_per_second"] == 9 / 20
    assert found["rows_per_second"] == sum(each.num_rows for each in inside) / 20
    assert found["bytes_per_second"] == sum(each.num_bytes for each in inside) / 20
    rows = sum(each.num_rows for each in inside if each.kind == "delta")
    assert found["tables"] == {
        FQN: {"rows_per_second": rows / 20, "bytes_per_second": rows * 16 / 20, "last_version": 31}
    }
    assert found["head"]["version"] == 32
    assert [each["version"] for each in found["versions"]] == list(range(32, 12, -1))
    assert sum(view.watch.pulse(clock.now, 10)) == sum(each.num_bytes for each in inside if each.kind == "delta")
    clock.now += 100
    late = View(storage.url, clock.now, view.watch).to_dict()
    assert (late["versions_per_second"], late["head"]["age_seconds"]) == (0, 100)


def test_it_begins_anew_where_the_stream_does(storage: Counting, clock: Clock, tmp_path: Path) -> None:
    writer = Writer(storage)
    writer.snapshot()
    publish(writer, clock, 20)
    watch = Watch(StreamLog(storage), window_seconds=60)
    watch.refresh(clock.now)
    publish(writer, clock, 5)
    (tmp_path / "stream" / "log" / f"{23:020d}.json").unlink()
    watch.refresh(clock.now)
    assert (watch.head.version, watch.starts) == (22, 1), "it cannot know yet that there is more"
    clock.now += 11
    watch.refresh(clock.now)
    assert (watch.head.version, watch.starts) == (26, 2)
    shutil.rmtree(tmp_path / "stream")
    other = Writer(Storage(storage.url, create=True))
    publish(other, clock, 40)
    watch.refresh(clock.now)
    assert watch.head == other.claim.head, "the next entry names another parent"
    assert {entry.generation for entry in watch.entries} == {1}
    assert len(watch.entries) == 41


def beat(writer: Writer, name: str, **changes) -> Heartbeat:
    head = writer.claim.head
    fields = {"version": head.version - 3, "lag_versions": 1, "lag_seconds": 0.5, "resyncs": 2, "error": None}
    return Heartbeat(**{"name": name, "time": time.time(), "stream": head.stream} | fields | changes)


def frames(storage: Storage, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["top", storage.url, *arguments.split()]) == 0
    return capsys.readouterr().out


def test_predictors_are_shown_and_dead_ones_age_out(storage: Counting, capsys) -> None:
    writer = Writer(storage)
    writer.snapshot()
    for number in range(5):
        writer.delta([number])
    now = time.time()
    for each in (
        beat(writer, "live"),
        beat(writer, "held", error=_EVIL),
        beat(writer, "silent", time=now - 100),
        beat(writer, "gone", time=now - 4000),
        beat(writer, "elsewhere", stream="0" * 32),
    ):
        leave_heartbeat(storage, each)
    found = json.loads(frames(storage, "--once --json", capsys))
    seen = {each["name"]: (each["state"], each["behind"], each["lag_versions"]) for each in found["predictors"]}
    assert seen == {
        "live": ("live", 1, 3),
        "held": ("live", 1, 3),
        "silent": ("silent", 3, 3),
        "elsewhere": ("live", None, None),
    }
    assert found["predictors_gone"] == 1
    text = frames(storage, "--once", capsys)
    assert text.index("\nheld ") < text.index("\nsilent ") < text.index("\nlive ")
    assert "predictor (and 1 gone)" in text
    assert "resyncs 8  errors 1" in text
    for bad in ("\x1b", "\x9b", "\u202e", "\r"):
        assert bad not in text
    assert "[red]\\x1b[31m" in text, "markup is no markup"


def test_lines_of_json_go_on_until_it_is_interrupted(storage: Counting, capsys, monkeypatch) -> None:
    writer = Writer(storage)
    writer.snapshot()
    left = [lambda: writer.delta([1]), lambda: setattr(storage, "is_broken", True), lambda: None]

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()
        Storage.read = broken if len(left) == 1 else read  # type: ignore[method-assign]

    read = Storage.read

    def broken(self, name, **options):
        raise StorageError(self.url, "connection refused")

    monkeypatch.setattr(Storage, "read", read)
    monkeypatch.setattr(top_command.time, "sleep", sleep)
    assert main(["top", storage.url, "--json", "--every", "0.5"]) == 130
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["head"]["version"] for line in lines] == [1, 2, 2, 2]
    assert [line["problem"] is not None for line in lines] == [False, False, True, False], "it tries again"
    assert "connection refused" in lines[2]["problem"]


def test_what_is_no_stream_is_said_at_once(tmp_path: Path, capsys) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "No stream is there" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 15), (200, 60)])
@pytest.mark.parametrize(("num_tables", "num_predictors", "num_versions"), [(1, 0, 1), (40, 30, 100), (1, 12, 3)])
def test_the_screen_fits(
    tmp_path: Path, width: int, height: int, num_tables: int, num_predictors: int, num_versions: int
) -> None:
    storage = Storage((tmp_path / "s").as_uri(), create=True, fsync=False)
    writer = Writer(storage)
    specs = {f"very.{'long.' * 30}name_{index}_{_EVIL}": writer.spec for index in range(num_tables)}
    specs = {fqn: TableSpec(fqn, 20, 4, torch.float32) for fqn in specs}
    for _ in range(num_versions):
        rows = [
            BlockRows.of(Block(fqn, (0, 20), (0, 4), 1, "list", Encoding.F32), torch.tensor([3]), torch.randn(1, 4))
            for fqn in specs
        ]
        writer.write("delta", rows, specs)
    for index in range(num_predictors):
        leave_heartbeat(storage, beat(writer, f"{'p' * 50}-{index}", error="x" * 500 if index % 5 == 0 else None))
    console = Console(width=width, height=height, record=True, file=io.StringIO(), markup=False)
    stream = Stream(storage, StreamLog(storage), Output(is_json=False))
    view = next(top_command._views(stream, 60.0))
    for each in (view, replace(view, problem="y" * 500)):
        console.print(screen(each, width, height))
        lines = console.export_text().splitlines()
        assert len(lines) <= height
        assert all(len(line) <= width for line in lines)
        assert lines[1].startswith(f"version {num_versions}"), "its head is whole"
        assert sum("…" in line or "name_" in line for line in lines) >= min(3 if height > 15 else 1, num_tables)
        assert any(line.split()[:2] == [str(num_versions), "delta"] for line in lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, number: int, code: int) -> None:
    storage = Storage((tmp_path / "stream").as_uri(), create=True)
    writer = Writer(storage)
    writer.snapshot()
    (tmp_path / "stream" / "predictors").mkdir()
    (tmp_path / "stream" / "predictors" / "x.json").write_text("nonsense")  # a warning at every refresh
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "delta_tracker.cli", "top", storage.url, "--every", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=_ROOT,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"is no heartbeat") < 2:
            assert select.select([ours], [], [], 120)[0], shown
            shown += os.read(ours, 65_536)
        process.send_signal(number)
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # closed by its last user
                break
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1, "the other screen is entered and left"
    begin, end = shown.index(b"\x1b[?1049h"), shown.index(b"\x1b[?1049l")
    assert shown.rindex(b"\x1b[?25h") > shown.index(b"\x1b[?25l"), "the cursor is back"
    assert b"WARNING" not in shown[begin:end], "nothing is written across the screen"
    assert b"Traceback" not in shown
