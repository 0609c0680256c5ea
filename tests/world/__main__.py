"""Run worlds: ``python -m tests.world --seeds 1000``, or ``--replay FILE`` for one schedule."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path

_now = time.monotonic  # before the clock is replaced

from tests.world import clock  # noqa: E402

clock.install()

from tests.world.shrink import shrink  # noqa: E402
from tests.world.values import Schedule, generate  # noqa: E402
from tests.world.world import run  # noqa: E402


def main() -> int:
    """Run the worlds that the arguments name; return 1 if a rule does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--replay", type=Path, help="file with one schedule as JSON; its operations are printed")
    parser.add_argument("--shrinks", type=int, default=1, help="number of findings of each rule to minimise")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.replay is not None:
        return int(bool(run(Schedule.from_json(arguments.replay.read_text()), print)))
    return _sweep(arguments)


def _sweep(arguments: argparse.Namespace) -> int:
    began, count, rules = _now(), 0, Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if _now() - began > 60 * arguments.minutes:
            break
        schedule = generate(seed)
        count += 1
        first = {each.rule: each for each in reversed(run(schedule))}
        for rule, found in first.items():
            rules[rule] += 1
            print(f"seed {seed}, schedule {count}, {_now() - began:.0f} s: {found}", flush=True)
            if rules[rule] <= arguments.shrinks:
                small = shrink(schedule, lambda each, rule=rule: any(found.rule == rule for found in run(each)))
                print(f"minimised: {run(small)}\n{small.to_json()}", flush=True)
    print(json.dumps({"schedules": count, "minutes": round((_now() - began) / 60, 2), "findings": rules}))
    return int(bool(rules))


if __name__ == "__main__":
    sys.exit(main())
