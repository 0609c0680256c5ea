"""Lose a rank of a job, and continue on the other rank from the newest version of the stream.

This program starts two agents of ``torchrun``, each with one rank, and kills the second agent with its rank. The other
rank fails, and the first agent starts it again, alone. It restores the newest version and trains on, while a predictor
follows. The first agent hosts the rendezvous, so it must survive. Run it with a new folder::

    python -m examples.elastic FOLDER
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torchrec import KeyedJaggedTensor

from delta_tracker import DataPosition, ModelDeltaTracker, Predictor, Publisher, Recovery, restore
from delta_tracker.errors import NotRecoverableError
from examples.crash_and_resume import COLUMNS, NUM_ROWS, TABLE, sharded_model

NUM_BATCHES, LOSE_AT = 60, 8  # a number of batches, and a version
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"


class Batches:
    """Batches of random ids; continues where the loaders of any number of ranks were."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        while self.position < NUM_BATCHES:
            self.position += 1
            generator = torch.Generator().manual_seed(1000 * self.position + dist.get_rank())
            ids = torch.randint(0, NUM_ROWS, (32,), generator=generator)
            yield KeyedJaggedTensor(["user"], ids, lengths=torch.ones(32, dtype=torch.int64))

    def state_dict(self) -> int:  # noqa: D102
        return self.position

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401, D102
        self.position = state

    def load_rank_states(self, states: Sequence[int]) -> None:  # noqa: D102
        self.position = max(states)


def work(folder: Path) -> None:
    """Train one rank from the newest version, and publish each batch."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    url = f"file://{folder}/stream"
    model = sharded_model()
    tracker = ModelDeltaTracker(model, consumers=["stream"])
    data = DataPosition(Batches())
    try:
        restored = restore(model, url, tracker=tracker, data=data)
        (folder / "restored").write_text(f"{restored.version} {restored.world_size} {dist.get_world_size()}")
    except NotRecoverableError as error:
        if error.version is not None:
            raise
        tracker.attach_data(data)
    publisher = Publisher(tracker, url, "stream", recovery=Recovery())
    publisher.publish()
    (folder / f"rank-of-{os.getppid()}").write_text(str(os.getpid()))
    for features in data:
        model(features)["user"].values().sum().backward()
        tracker.step()
        publisher.publish()
        time.sleep(0.2)
    publisher.close()  # only after a loss is the whole table on rank 0
    torch.save(tracker.read_rows(TABLE), folder / "table.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Start two agents, kill the second one with its rank, and compare the tables."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    job = ["-m", "examples.elastic", str(folder), "--worker"]
    agents = [subprocess.Popen([*command, f"--rdzv-conf=is_host={host},{QUICK}", *job]) for host in (1, 0)]
    served = torch.zeros(NUM_ROWS, COLUMNS)
    try:
        while len(list(folder.glob("rank-of-*"))) < len(agents):
            if any(agent.poll() is not None for agent in agents):
                raise SystemExit("an agent has ended before both ranks trained")
            time.sleep(0.1)
        predictor = Predictor({TABLE: served}, f"file://{folder}/stream")
        while predictor.sync() < LOSE_AT:
            time.sleep(0.1)
            assert agents[0].poll() is None, "the first agent has ended early"
        agents[1].kill()
        os.kill(int((folder / f"rank-of-{agents[1].pid}").read_text()), signal.SIGKILL)
        killed_at = predictor.sync()
        assert agents[0].wait() == 0
        predictor.sync()
        version, before, after = map(int, (folder / "restored").read_text().split())
        assert version >= killed_at, "no version is lost"
        assert (before, after, predictor.status().resyncs) == (2, 1, 0)
        assert served.equal(torch.load(folder / "table.pt"))
        print(f"rank killed at version {killed_at}, job continued from version {version}: the predictor equals it")
    finally:
        for agent in agents:
            agent.terminate()  # with its rank


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the stream and the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (work if arguments.worker else main)(arguments.folder.resolve())
