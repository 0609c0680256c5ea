"""Processes that share a host cache: one fetch, a killed fetcher, a suspended one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.storage.storage import Storage
from tests.forked import start
from tests.stores.rules import calls, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.streams import FQN, Writer
from tests.waiting import eventually

_ROWS, _DIM = 330_000, 16  # 21 MB: three pieces
_SECONDS = 120.0


def read(directory: str, patience: float, stops_after: int = -1) -> None:
    """Read the stream through the cache. After some ranges, wait for ever."""
    root = Path(directory)
    count = 0

    def saw(operation: Operation) -> None:
        """Append a line to a file for each range of a part."""
        nonlocal count
        with (root / "seen").open("a") as file:
            file.write(f"{operation.arguments.get('begin', 'whole')}\n")
        if count == stops_after:
            (root / "stopped").touch()
            time.sleep(10 * _SECONDS)
        count += 1

    cache = HostCache(root / "cache", patience_seconds=patience)
    table = torch.zeros(_ROWS, _DIM)
    while not (root / "go").exists():
        time.sleep(0.001)
    watched = calls(on("read", "read_range", name="parts/"), before=saw)
    Predictor({FQN: table}, WrappedStorage(Storage(root / "stream"), watched), cache=cache).sync()
    assert torch.equal(table, torch.load(root / "table.pt"))
    (root / f"bypasses-{os.getpid()}").write_text(str(cache.counts["bypasses"]))


def written(root: Path) -> None:
    writer = Writer(Storage(f"file://{root}/stream", create=True, fsync=False), num_rows=_ROWS, dim=_DIM)
    writer.table.normal_()
    writer.snapshot()
    torch.save(writer.table, root / "table.pt")


def ended(process: Any) -> int | None:
    process.join(_SECONDS)
    code: int | None = process.exitcode
    return code


def seen(root: Path) -> list[str]:
    return (root / "seen").read_text().split()


def test_the_processes_of_a_host_fetch_each_part_once(tmp_path: Path) -> None:
    written(tmp_path)
    processes = [start(read, str(tmp_path), _SECONDS) for _ in range(8)]
    (tmp_path / "go").touch()
    assert [ended(process) for process in processes] == [0] * 8
    assert seen(tmp_path) == ["0", str(8 << 20), str(16 << 20)]


@pytest.mark.parametrize("num_ranges", [0, 2])
def test_the_fetch_of_a_killed_process_is_completed_by_another(tmp_path: Path, num_ranges: int) -> None:
    written(tmp_path)
    (tmp_path / "go").touch()
    killed = start(read, str(tmp_path), _SECONDS, num_ranges)
    eventually((tmp_path / "stopped").exists, seconds=_SECONDS)
    others = [start(read, str(tmp_path), _SECONDS) for _ in range(2)]
    os.kill(killed.pid, signal.SIGKILL)  # type: ignore[arg-type]
    assert [ended(process) for process in (killed, *others)] == [-signal.SIGKILL, 0, 0]
    assert len(seen(tmp_path)) == num_ranges + 1 + 3
    assert not any((tmp_path / "cache" / "drafts").iterdir())


def test_a_suspended_process_does_not_block_the_others(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "go").touch()
    suspended = start(read, str(tmp_path), _SECONDS, 1)
    eventually((tmp_path / "stopped").exists, seconds=_SECONDS)
    os.kill(suspended.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    try:
        others = [start(read, str(tmp_path), 0.2) for _ in range(2)]
        assert [ended(process) for process in others] == [0, 0]
    finally:
        os.kill(suspended.pid, signal.SIGKILL)  # type: ignore[arg-type]
    ended(suspended)
    assert [path.read_text() for path in tmp_path.glob("bypasses-*")] == ["1", "1"]
    assert not any((tmp_path / "cache" / "objects").iterdir())
