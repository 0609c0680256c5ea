"""Long random schedules: ``python -m tests.tracker.long_run --store-steps 100000 --model-steps 2000``.

Runs the tests' schedules with other seeds. Fails if the log and its reference disagree, if a copy differs from the
model's rows, or if an event that a schedule must cover never happened.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.stream.storage.storage import Storage
from tests.ranks import RankPool
from tests.stream.streams import FQN, Writer
from tests.tracker.test_segments import make_store, run_random

_FIRST_SEED = 1_000_000
_EVENTS_OF_A_STORE = 1000
_EVENTS_OF_A_MODEL = 250


def store_schedules(num_steps: int) -> Counter[str]:
    """Run the log alone, on both engines, with and without old states, with and without delete_on_read."""
    counts: Counter[str] = Counter()
    for number in range(-(-num_steps // _EVENTS_OF_A_STORE)):
        make = make_store(("torch", "numba")[number % 2], keeps_states=number % 4 < 2)
        schedule = run_random(_FIRST_SEED + number, make, _EVENTS_OF_A_STORE, delete_on_read=number % 8 < 4)
        counts += Counter(schedule.counts)
        counts["steps"] += _EVENTS_OF_A_STORE
    return counts


def model_schedules(num_steps: int, world_size: int) -> Counter[str]:
    """Run a real sharded model, alternating EC and EBC, on ``world_size`` ranks."""
    counts: Counter[str] = Counter()
    pool = RankPool(world_size)
    try:
        for number in range(-(-num_steps // _EVENTS_OF_A_MODEL)):
            ranks = pool.run(
                "tests.tracker.tracking_cases:schedule",
                timeout_seconds=300,
                seed=_FIRST_SEED + number,
                num_events=_EVENTS_OF_A_MODEL,
                bag=bool(number // 2 % 2),
            )
            for rank, found in enumerate(ranks):
                counts += Counter({f"{name}, rank {rank}": count for name, count in found.items()})
                # A rank on which nothing happened must be visible, and adding Counters drops zeros.
                counts.update({f"{name}, rank {rank}": 0 for name in found})
            counts["steps"] += _EVENTS_OF_A_MODEL
    finally:
        pool.stop()
    return counts


_NUM_ROWS, _DIM = 2048, 64


def _look_up(predictor: Predictor, model: Mapping[str, Tensor], done: threading.Event, seed: int) -> Counter[str]:
    """Look rows up until ``done``; return counts of what was seen."""
    generator = torch.Generator().manual_seed(seed)
    seen, last = Counter(), -1
    while not done.is_set():
        ids = torch.randint(_NUM_ROWS, (256,), generator=generator)
        with predictor.reading() as served:
            rows, dense = model[FQN][ids], float(model["w"])
        if served.version is None:
            continue
        seen["torn rows"] += int((rows != rows[:, :1]).any(dim=1).sum())
        seen["wrong dense tensors"] += dense != served.version
        seen["steps back"] += served.version < last
        seen["versions seen"] += served.version != last
        seen["lookups"] += 1
        seen["lookups while applying"] += served.applying is not None
        last = served.version
    return seen


def _publish(writer: Writer, generator: torch.Generator) -> int:
    """Publish a version in which all values of a row are equal; every tenth is a snapshot."""
    version = writer.claim.head.version + 1
    writer.dense["w"] = torch.tensor(float(version))
    ids = torch.randperm(_NUM_ROWS, generator=generator)[:500].sort().values
    writer.table[ids] = torch.randn(len(ids), 1, generator=generator)
    if version % 10 == 1:
        return writer.snapshot().version
    return writer.write("delta", [writer.rows(ids.tolist())]).version


def serve_while_applying(url: str, *, num_versions: int | None = None, seconds: float = math.inf) -> Counter[str]:
    """Two threads look rows up while a predictor applies versions without a pause.

    All values of a row are equal in every version, so that torn rows are visible. The dense tensor holds the number of
    its version. Runs until there are ``num_versions`` versions or the time is over.

    Returns:
        Counts of expected events, and of events that must never happen.
    """
    writer = Writer(Storage(url, create=True, fsync=False), num_rows=_NUM_ROWS, dim=_DIM)
    model = writer.model() | {"w": torch.full((), -1.0)}
    predictor, done = Predictor(ModelTarget(model, chunk_rows=64), url), threading.Event()
    generator, end = torch.Generator().manual_seed(2), time.monotonic() + seconds
    with ThreadPoolExecutor() as threads:
        readers = [threads.submit(_look_up, predictor, model, done, seed) for seed in range(2)]
        predictor.follow(poll_seconds=1e-6)
        try:
            version = 0
            while version != num_versions and time.monotonic() < end:
                version = _publish(writer, generator)
                while (predictor.version or 0) < version - 3 and predictor.error is None:
                    time.sleep(0.0005)
            while predictor.version != version and predictor.error is None:
                time.sleep(0.0005)
        finally:
            done.set()
            predictor.stop()
        counts = sum((reader.result() for reader in readers), Counter())
    assert torch.equal(model[FQN], writer.table), "the predictor does not end where the stream ends"
    counts["versions"] = version
    return counts


def serving(seconds: float) -> Counter[str]:
    """Look rows up during apply; fail if a row was torn, a dense tensor was early, or a version went back."""
    with tempfile.TemporaryDirectory() as directory:
        counts = serve_while_applying(f"file://{directory}/stream", seconds=seconds)
    for wrong in ("torn rows", "wrong dense tensors", "steps back"):
        assert not counts.pop(wrong, 0), wrong
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all schedules; return 0 if they passed and every event that they must cover happened."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tracker.long_run", description="Run random schedules for long."
    )
    parser.add_argument("--store-steps", type=int, default=100_000, help="events on the bare log")
    parser.add_argument("--model-steps", type=int, default=2_000, help="events on models, for each number of ranks")
    parser.add_argument("--serve-seconds", type=float, default=60.0, help="time for which rows are looked up")
    given = parser.parse_args(arguments)
    runs = {
        "log": lambda: store_schedules(given.store_steps),
        "model, 1 rank": lambda: model_schedules(given.model_steps, 1),
        "model, 2 ranks": lambda: model_schedules(given.model_steps, 2),
        "serving": lambda: serving(given.serve_seconds),
    }
    never = []
    for name, run in runs.items():
        begin = time.monotonic()
        try:
            counts = run()
        except AssertionError as failure:
            print(f"{name}: FAILED\n{failure}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - begin
        print(f"{name}: {', '.join(f'{count:,} {kind}' for kind, count in counts.items())} in {seconds:.0f} s")
        never += [f"{name}: {kind}" for kind, count in counts.items() if not count]
    if never:
        print(f"never happened: {never}", file=sys.stderr)
    return bool(never)


if __name__ == "__main__":
    raise SystemExit(main())
