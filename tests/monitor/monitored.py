"""A tiny trainer and a predictor of plain torch that serve their metrics, until they are killed.

    python -m tests.monitor.monitored trainer URL PORT OPTIONS
    python -m tests.monitor.monitored predictor URL PORT OPTIONS

``OPTIONS`` are those of the store as JSON, or null. On SIGUSR1, the clock of the process is set an hour ahead.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import timedelta

import torch

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, Retention, Storage, Upkeep
from delta_tracker.monitor import MONITOR
from delta_tracker.monitor.sinks.prometheus import PrometheusSink
from delta_tracker.stream.heartbeat_metrics import show_heartbeats

_ROWS, _COLUMNS = 2000, 8
_CADENCE_SECONDS = 1.5
_NAME = "host-1"
_time = time.time


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.EmbeddingBag(_ROWS, _COLUMNS, sparse=True))


def _set_clock(*_: object) -> None:
    time.time = lambda: _time() + 3600  # the clock of the whole process, as the library reads it


def train(storage: Storage) -> None:
    """Train and publish; a fenced publisher goes on training."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cadence = Cadence(seconds=_CADENCE_SECONDS, snapshot_every=20)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(
        tracker, storage, cadence=cadence, upkeep=Upkeep(retention=Retention(versions=40, grace_seconds=30))
    )
    show_heartbeats(storage)
    while True:
        optimizer.zero_grad()
        model(torch.randint(_ROWS, (1, 16))).sum().backward()
        optimizer.step()
        tracker.step()
        publisher.step()
        time.sleep(0.05)


def serve(storage: Storage) -> None:
    """Follow the stream."""
    predictor = Predictor(_model(), storage, name=_NAME)
    predictor.follow(0.25)
    while True:
        time.sleep(60)


def main(role: str, url: str, port: str, options: str) -> None:
    """Run a role."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, _set_clock)
    MONITOR.start([PrometheusSink(int(port))], interval=timedelta(seconds=0.5))
    storage = Storage(url, options=json.loads(options), create=role == "trainer")
    {"trainer": train, "predictor": serve}[role](storage)


if __name__ == "__main__":
    main(*sys.argv[1:])
