"""Fixtures of the command line's tests: commands in this process, and streams whose versions are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, make
from tests.cli.trainer import Trainer
from tests.stream.streams import FQN, Writer


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return make(tmp_path / "stream")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(Storage((tmp_path / "stream").as_uri(), create=True))
    random = np.random.default_rng(0)
    trainer.snapshot()
    for number in range(12):
        ids = [sorted(random.choice(size, count, replace=False).tolist()) for size, count in ((200, 40), (30, 6))]
        trainer.delta(a=ids[0], b=ids[1] if number % 3 else [])
        if number == 5:
            trainer.move(FQN, [7, 8])  # what a snapshot brings counts as moved too
            trainer.snapshot()
        if number == 8:
            trainer.writer.claim = StreamLog(trainer.writer.storage).claim()
    return trainer
