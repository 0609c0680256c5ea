"""A full disk: publishing raises an error and continues later, and predictors are unaffected."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage
from tests.ranks import RankPool
from tests.stream.streams import FQN, Writer
from tests.system.full_disk_cases import fill


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of half a megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(directory)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine mounts no small file system: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_publishing_to_a_full_disk(two_ranks: RankPool, disk: Path) -> None:
    first, second = two_ranks.run("tests.system.full_disk_cases:full", directory=str(disk))
    assert len(first) == len(second) > 3
    assert first[-1] == second[-1] == "nothing was raised"
    for ours, theirs in zip(first[:-1], second[:-1], strict=True):
        assert {ours.split(":")[0], theirs.split(":")[0]} <= {"StorageError", "RankFailedError"}
        assert "No space left on device" in ours + theirs


def test_a_predictor_follows_from_a_full_disk(disk: Path, caplog) -> None:
    """Only its heartbeat cannot be written."""
    writer = Writer(Storage(f"file://{disk}/stream", create=True))
    writer.snapshot()
    writer.delta([1, 2])
    filler = disk / "filler"
    fill(filler, but_pages=0)
    with pytest.raises(StorageError, match="No space left"):
        writer.delta([3])
    model = writer.model()
    predictor = Predictor(model, writer.storage, name="here")
    with caplog.at_level(logging.WARNING):
        assert predictor.sync() == 2
    assert caplog.text.count("could not write the predictor's heartbeat") == 1
    filler.unlink()
    last = writer.delta([3])
    assert predictor.sync() == last.version
    assert torch.equal(model[FQN], writer.table)
