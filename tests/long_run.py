"""Random schedules for as long as one likes: ``python -m tests.long_run --store-steps 100000 --model-steps 2000``.

The same schedules as in the tests, on seeds that those do not use. Fails if the log and its reference disagree, if a
copy differs from the model's rows, or if something that a schedule is about never happened.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.ranks import RankPool
from tests.test_segments import make_store, run_random

_FIRST_SEED = 1_000_000
_EVENTS_OF_A_STORE = 1000
_EVENTS_OF_A_MODEL = 250


def store_schedules(num_steps: int) -> Counter[str]:
    """The bare log, on both engines, with and without old states, forgetting and not."""
    counts: Counter[str] = Counter()
    for number in range(-(-num_steps // _EVENTS_OF_A_STORE)):
        make = make_store(("torch", "numba")[number % 2], keeps_states=number % 4 < 2)
        schedule = run_random(_FIRST_SEED + number, make, _EVENTS_OF_A_STORE, delete_on_read=number % 8 < 4)
        counts += Counter(schedule.counts)
        counts["steps"] += _EVENTS_OF_A_STORE
    return counts


def model_schedules(num_steps: int, world_size: int) -> Counter[str]:
    """A real sharded model, EC and EBC in turn, on ``world_size`` ranks."""
    counts: Counter[str] = Counter()
    pool = RankPool(world_size)
    try:
        for number in range(-(-num_steps // _EVENTS_OF_A_MODEL)):
            ranks = pool.run(
                "tests.cases.tracking:schedule",
                timeout_seconds=300,
                seed=_FIRST_SEED + number,
                num_events=_EVENTS_OF_A_MODEL,
                bag=bool(number // 2 % 2),
            )
            for rank, found in enumerate(ranks):
                counts += Counter({f"{name}, rank {rank}": count for name, count in found.items()})
                # A rank on which nothing happened must show, and a Counter drops its zeros.
                counts.update({f"{name}, rank {rank}": 0 for name in found})
            counts["steps"] += _EVENTS_OF_A_MODEL
    finally:
        pool.stop()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all schedules; 0 if none failed and everything that they are about happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.long_run", description="Run random schedules for long.")
    parser.add_argument("--store-steps", type=int, default=100_000, help="events on the bare log")
    parser.add_argument("--model-steps", type=int, default=2_000, help="events on models, for each number of ranks")
    given = parser.parse_args(arguments)
    runs = {
        "log": lambda: store_schedules(given.store_steps),
        "model, 1 rank": lambda: model_schedules(given.model_steps, 1),
        "model, 2 ranks": lambda: model_schedules(given.model_steps, 2),
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
