"""Publishers that some ranks fail to build: ``python -m tests.publisher.building_cases --seeds 20``.

In each run one of two or three ranks is killed at a random moment while it builds its publisher. Every other rank must
get a typed error in bounded time and release everything that the publisher held. The survivors must be able to build a
new publisher in a new process group. The parent imports everything and uses neither store nor process group, so that it
can fork.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from delta_tracker import ModelDeltaTracker, Publisher, TopK, TrackingMode
from delta_tracker.errors import StreamError
from delta_tracker.publisher import coordinator, exchange
from delta_tracker.tracker import rank_group
from delta_tracker.tracker.rank_group import RankGroup
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt, is_interrupted

_TIMEOUT = timedelta(seconds=1)
_GROUP_TIMEOUT = timedelta(seconds=90)  # of the default group: far above the time in which a rank must raise
_SLACK_SECONDS = 45.0
_LIFE_SECONDS = 120
_FILES = [module.__file__ for module in (distributed_c10d, rank_group, exchange, coordinator)]
_MAX_STEPS = 150
_MAX_DELAY = 0.03


def interrupted(rank: int, world_size: int, url: str) -> int:
    """Rank 0 is interrupted while it waits for rank 1, which then finds it in its next attempt."""
    spec = Spec([Table("t", 6, "row")])
    with ModelDeltaTracker(shard(spec)) as tracker:

        def build() -> Publisher:
            return Publisher(tracker, url, timeout=timedelta(seconds=60))

        assert rank or is_interrupted(build)
        dist.barrier()
        with build() as publisher:
            return publisher.publish().version


def failed_callback(rank: int, world_size: int) -> str:
    """An error of the function that is called during a wait is raised, and the wait can be repeated."""
    group = RankGroup("callback", "failed_callback()", timedelta(seconds=60))
    dist.barrier()
    message = "not called"
    if rank:
        store: Any = dist.distributed_c10d._get_default_store()
        store.wait(["callback failed"], timedelta(seconds=60))
        return str(float(group.all_gather(torch.ones(1))[0]))
    gathering = group.start_all_gather(torch.zeros(1))

    def fail() -> None:
        raise RuntimeError("cannot schedule new futures")

    try:
        gathering.result(fail)
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    dist.distributed_c10d._get_default_store().set("callback failed", "yes")
    return f"{message}, then {float(gathering.result()[1])}"


def lone(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Build a publisher on rank 0 alone, twice; then on all ranks, first with arguments that differ."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    messages = []
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        threads = set(threading.enumerate())
        for _ in range(2 if rank == 0 else 0):
            begin = time.monotonic()
            messages.append(attempt(lambda: Publisher(tracker, url, timeout=timedelta(seconds=0.5))))
            assert time.monotonic() - begin < 60
            assert tracker.get_delta(commit=False).num_rows == 0, "the consumer is free"
            assert set(threading.enumerate()) == threads
        dist.barrier()
        top_k = TopK(rows=3) if rank == 0 else None
        messages.append(attempt(lambda: Publisher(tracker, url, top_k=top_k)))
        publisher = Publisher(tracker, url)
        versions = [publisher.publish().version]
        model(batch(spec, torch.Generator().manual_seed(rank))).backward()
        versions.append(publisher.publish().version)
        publisher.close()
    return {"messages": messages, "versions": versions}


def _init(root: Path, name: str, draw: random.Random, rank: int, world_size: int) -> None:
    """Join a process group whose store is a file or a server on rank 0."""
    if draw.random() < 0.5:
        method = f"file://{root}/{name}"
    else:
        if rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                (root / f"{name}.draft").write_text(str(probe.getsockname()[1]))
            (root / f"{name}.draft").rename(root / f"{name}.port")
        while not (root / f"{name}.port").exists():
            time.sleep(0.005)
        method = f"tcp://127.0.0.1:{(root / f'{name}.port').read_text()}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)


def _arm(draw: random.Random) -> None:
    """Kill this process at a random call of torch.distributed or of our communication, or after a random time."""
    if draw.random() < 0.6:
        last = draw.randrange(_MAX_STEPS)
        steps = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal steps
            steps += frame.f_code.co_filename in _FILES
            if steps > last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
    else:
        delay = draw.uniform(0, _MAX_DELAY)
        threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()


def _survive(root: Path, seed: int, rank: int, world_size: int) -> str:
    """Run one rank; return which error it got."""
    draw = random.Random(seed)  # the same on all ranks
    _init(root, "first", draw, rank, world_size)
    victim = draw.randrange(world_size)
    model = shard(Spec([Table("t", 6, "row")]))
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    url = f"file://{root}/stream"
    tracker.get_delta(top_k=TopK(rows=1))
    tracker.state_dict(strategy="gather")
    dist.barrier()
    threads = set(threading.enumerate())
    begin = time.monotonic()
    if rank == victim:
        _arm(draw)
    try:
        publisher = Publisher(tracker, url, timeout=_TIMEOUT)
        try:
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            publisher.publish()
        finally:
            publisher.close()
    except StreamError as error:
        if rank == victim:  # on a busy machine, it gave up before it was due
            os.kill(os.getpid(), signal.SIGKILL)
        got = type(error).__name__
    else:
        got = "nothing"
    seconds = time.monotonic() - begin
    assert seconds < 2 * _TIMEOUT.total_seconds() + _SLACK_SECONDS, f"{got} after {seconds} s"
    assert got != "nothing", "it published without the dead rank"
    left = set(threading.enumerate()) - threads
    assert not left, left
    tracker.get_delta(commit=False)  # the consumer is not reserved
    for call in (lambda: tracker.get_delta(top_k=TopK(rows=1)), lambda: tracker.state_dict(strategy="gather")):
        assert attempt(call).startswith("RankLostError")
    dist.destroy_process_group()
    survivors = [each for each in range(world_size) if each != victim]
    _init(root, "second", draw, survivors.index(rank), len(survivors))
    Publisher(tracker, url, timeout=timedelta(seconds=30)).close()
    dist.destroy_process_group()
    return got


def _fork(root: Path, seed: int, rank: int, world_size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    answer: dict[str, str] = {}
    try:
        signal.alarm(_LIFE_SECONDS)
        answer["got"] = _survive(root, seed, rank, world_size)
    except BaseException:  # noqa: BLE001  the parent reads it
        answer["error"] = traceback.format_exc()
    finally:
        (root / f"rank-{rank}").write_text(json.dumps(answer))
        os._exit(0)


def run(seed: int, root: Path) -> list[str]:
    """Return the errors that the survivors of a run got."""
    world_size = random.Random(f"ranks of {seed}").choice([2, 3])
    pids = [_fork(root, seed, rank, world_size) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    answers = [json.loads(path.read_text()) for path in sorted(root.glob("rank-*"))]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert not errors, f"seed {seed}: {errors}"
    assert min(codes) == -signal.SIGKILL, codes
    assert codes.count(0) == world_size - 1, f"seed {seed}: exit codes {codes}"
    return [answer["got"] for answer in answers]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds; print the number of survivors by error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        root = Path(tempfile.mkdtemp(prefix="building-"))
        try:
            seen.update(run(seed, root))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
