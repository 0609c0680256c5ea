"""The command line run in this process, on streams whose versions are known."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from delta_tracker.cli.main import main
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import Heartbeat, write_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity
from tests.stream.streams import Writer

HOSTILE = "[red]\x1b[31m\x1b[2J\r\nnext line\x9b1m\u202e"


class Cli:
    """Runs commands in this process: ``cli("tail", url, code=1)`` checks the exit code and returns the output.

    :attr:`err` is the error output of the last command.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        self._capsys.readouterr()
        assert main([str(each) for each in arguments]) == code
        out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return out

    def json(self, *arguments: object, code: int = 0) -> dict:
        return json.loads(self(*arguments, "--json", code=code))


def make(path: Path, **options) -> Writer:
    """A stream of the versions 0 to 4: a claim, a snapshot, three deltas of three rows, all with a dense tensor."""
    torch.manual_seed(0)
    writer = Writer(Storage(path.as_uri(), create=True), num_rows=50, **options)
    writer.dense = {"over.weight": torch.randn(3, 2)}
    writer.snapshot()
    for number in range(3):
        writer.delta([number, 10 + number, 49])
    return writer


def url_of(writer: Writer) -> str:
    return writer.storage.url


def path_of(writer: Writer, name: str) -> Path:
    return Path(url_of(writer).removeprefix("file://")) / name


def entry(writer: Writer, version: int) -> Manifest:
    found = StreamLog(writer.storage).read(version)
    assert found is not None
    return found


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, os.strerror(28))


def beat(writer: Writer, name: str, **changes) -> Heartbeat:
    head = writer.claim.head
    fields = {"version": head.version - 3, "lag_versions": 1, "lag_seconds": 0.5, "resyncs": 2, "error": None}
    return Heartbeat(**{"name": name, "time": time.time(), "stream": head.stream} | fields | changes)


def leave(writer: Writer, beat: Heartbeat, seconds_ago: float = 0.0) -> None:
    """Write a heartbeat, and date it in the store."""
    write_heartbeat(writer.storage, beat)
    date(path_of(writer, f"predictors/{beat.name}.json"), seconds_ago)


def date(path: Path, seconds_ago: float) -> None:
    modified = time.time() - seconds_ago
    os.utime(path, (modified, modified))


IDENTITY = Identity(1000, (Bucket((0, 25), 24), Bucket((25, 50), 49)))


def make_owned(path: Path) -> Writer:
    """A stream of a table with raw ids: a snapshot, and two deltas in which raw ids move and are evicted."""
    writer = Writer(Storage(path.as_uri(), create=True), num_rows=50, identity=IDENTITY)
    writer.owners[:4] = torch.tensor([100, 101, 102, 103])
    writer.snapshot()
    writer.owners[[1, 30]] = torch.tensor([107, 900])  # 101 is evicted
    writer.owner_changes = 2, 1
    writer.delta([1, 2, 30])
    writer.owners[[0, 5]] = torch.tensor([NO_OWNER, 100])  # 100 moves from row 0 to row 5
    writer.owner_changes = 1, 1
    writer.delta([0, 5])
    return writer
