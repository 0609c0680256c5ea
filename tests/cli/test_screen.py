"""The screen of ``top`` fits, whatever a stream holds."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from delta_tracker.cli import top as top_command
from delta_tracker.cli.output import Output
from delta_tracker.cli.screen import screen
from delta_tracker.cli.stream_command import Stream
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block
from delta_tracker.stream.heartbeat import write_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.commands import HOSTILE, beat
from tests.stream.streams import Writer


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 15), (200, 60)])
@pytest.mark.parametrize(("num_tables", "num_predictors", "num_versions"), [(1, 0, 1), (40, 30, 100), (1, 12, 3)])
def test_the_screen_fits(
    tmp_path: Path, width: int, height: int, num_tables: int, num_predictors: int, num_versions: int
) -> None:
    storage = Storage((tmp_path / "s").as_uri(), create=True, fsync=False)
    writer = Writer(storage)
    specs = {f"very.{'long.' * 30}name_{index}_{HOSTILE}": writer.spec for index in range(num_tables)}
    specs = {fqn: TableSpec(fqn, 20, 4, torch.float32) for fqn in specs}
    for _ in range(num_versions):
        rows = [
            BlockRows.of(Block(fqn, (0, 20), (0, 4), 1, "list", Encoding.F32), torch.tensor([3]), torch.randn(1, 4))
            for fqn in specs
        ]
        writer.write("delta", rows, specs)
    for index in range(num_predictors):
        write_heartbeat(storage, beat(writer, f"{'p' * 50}-{index}", error="x" * 500 if index % 5 == 0 else None))
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
        if num_predictors and each.problem is None:
            assert any(line.startswith(("✕ ", "! ")) for line in lines[3:]), "a predictor has an error"
            assert any(line.startswith("  next step: ") for line in lines) is (height >= 24)
        assert lines[-1] == "Ctrl-C quits"


def test_an_unreadable_store_is_no_standstill(tmp_path: Path) -> None:
    storage = Storage((tmp_path / "s").as_uri(), create=True, fsync=False)
    writer = Writer(storage)
    for number in range(3):
        writer.delta([number])
    view = next(top_command._views(Stream(storage, StreamLog(storage), Output(is_json=False)), 60.0))
    shown = []
    for each in (view, replace(view, now=view.now + 3600, problem="connection refused")):
        console = Console(width=100, record=True, file=io.StringIO(), markup=False)
        console.print(screen(each, 100))
        shown.append(console.export_text().splitlines())
    before, after = shown
    assert after[2].startswith(before[2].rstrip())
    assert "! no data since" in after[2]
