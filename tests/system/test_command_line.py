"""``delta-tracker`` as a program: interrupts, closed pipes, terminals, and streams on S3."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, make, url_of
from tests.servers import S3
from tests.stream.streams import FQN, Writer
from tests.system.program import program


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return make(tmp_path / "stream")


def test_tail_follows_and_exits_cleanly_on_an_interrupt(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    with program("tail", directory, "--json", "--every", "0.05") as tail:
        assert "waiting for its first version" in tail.stderr.readline()
        writer = make(directory)
        assert [json.loads(tail.stdout.readline())["version"] for _ in range(5)] == [0, 1, 2, 3, 4]
        writer.delta([7])
        assert json.loads(tail.stdout.readline())["rows"] == 1
        tail.send_signal(signal.SIGINT)
        assert tail.wait(240) == 130
        assert tail.stderr.read().strip() == "interrupted"


def test_a_reader_that_leaves_is_no_error(writer: Writer) -> None:
    with program("tail", url_of(writer), "-n", "0", "--json", "--every", "0.05") as tail:
        tail.stdout.close()
        deadline = time.monotonic() + 240
        while tail.poll() is None and time.monotonic() < deadline:
            writer.delta([1])
            time.sleep(0.05)
        assert tail.wait(240) == 141
        assert tail.stderr.read() == ""


_ROOT = Path(__file__).parents[2]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage((tmp_path / "stream").as_uri(), create=True, fsync=False)


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
        while shown.count(b"ignored malformed heartbeat") < 2:
            assert select.select([ours], [], [], 120)[0], shown
            shown += os.read(ours, 65_536)
        process.send_signal(number)
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # closed by its last user
                break
        assert process.wait(240) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1, "the other screen is entered and left"
    begin, end = shown.index(b"\x1b[?1049h"), shown.index(b"\x1b[?1049l")
    assert shown.rindex(b"\x1b[?25h") > shown.index(b"\x1b[?25l"), "the cursor is back"
    assert b"WARNING" not in shown[begin:end], "nothing is written across the screen"
    assert b"Traceback" not in shown


def test_a_path_a_url_and_s3_are_all_streams(
    cli: Cli, writer: Writer, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.json("verify", "stream")["entries"] == cli.json("verify", url_of(writer))["entries"] == 5
    url = f"{s3.url}/cli"
    remote = Writer(Storage(url, options=s3.options))
    remote.snapshot()
    options = [word for name, value in s3.options.items() for word in ("-o", f"{name}={value}")]
    assert cli.json("inspect", url, *options)["head"]["version"] == 1
    assert cli.json("verify", url, *options)["ok"]
    cli("export", url, *options, "--out", "remote")
    assert torch.equal(load_file(f"remote/{FQN}.weight.safetensors")[f"{FQN}.weight"], remote.table)
