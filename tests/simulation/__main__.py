"""Run worlds: ``python -m tests.simulation --seeds 1000``, ``--known``, or ``--replay FILE`` for one schedule.

A seed gives the same run, in any process: the random hashes of Python are switched off, and everything is imported
before the first run.

The last line of the output is a JSON object with the counts. The exit code is 1 if a rule does not hold that is not
known, or if a known finding is not found.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_now = time.monotonic  # before the clock is replaced

from tests.simulation import threads  # noqa: E402

threads.install()


from tests.simulation.disk import disk  # noqa: E402
from tests.simulation.everything import prepare  # noqa: E402
from tests.simulation.known import KNOWN, KNOWN_RULES  # noqa: E402
from tests.simulation.operators import FOLLOWED, IGNORED  # noqa: E402
from tests.simulation.previous import PREVIOUS  # noqa: E402
from tests.simulation.shrink import shrink  # noqa: E402
from tests.simulation.values import Schedule, generate  # noqa: E402
from tests.simulation.world import CALLS, run  # noqa: E402

prepare()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worlds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="number of schedules; by default any with --minutes, otherwise none")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--plain", action="store_true", help="one rank, local directories, no threads that follow")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--shrinks", type=int, default=1, help="number of findings of each unknown rule to minimise")
    parser.add_argument("--stop", action="store_true", help="end after the first finding that is not known")
    parser.add_argument("--known", action="store_true", help="check that each known finding is still found")
    parser.add_argument("--replay", type=Path, help="file with one schedule as JSON, whose run is printed")
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if arguments.replay is not None:
        return int(bool(run(Schedule.from_json(arguments.replay.read_text()), print)))
    lost = [name for name, (rule, schedule) in KNOWN.items() if rule not in _rules(schedule)] if arguments.known else []
    counts = _sweep(arguments)
    print(json.dumps({**counts, "known_but_not_found": lost}))
    return int(bool(lost or counts["findings"]))


def _sweep(arguments: argparse.Namespace) -> dict[str, object]:
    """Run the schedules of many seeds, and return counts."""
    began, count, turns = _now(), 0, 0
    rules = Counter[str]()
    unlimited = sys.maxsize if arguments.minutes < float("inf") else 0
    for seed in range(arguments.seed, arguments.seed + (arguments.seeds or unlimited)):
        is_found = arguments.stop and not rules.keys() <= KNOWN_RULES
        if is_found or _now() - began > 60 * arguments.minutes:
            break
        schedule = generate(seed, is_plain=arguments.plain)
        count += 1
        first = {each.rule: each for each in reversed(run(schedule))}
        turns += threads.SCHEDULER.turns
        for rule, found in first.items():
            rules[rule] += 1
            print(f"seed {seed}, schedule {count}, {_now() - began:.0f} s: {found}", flush=True)
            if rule not in KNOWN_RULES and rules[rule] <= arguments.shrinks:
                small = shrink(schedule, lambda each, rule=rule: rule in _rules(each))
                print(f"minimised: {run(small)}\n{small.to_json()}", flush=True)
    return {
        "schedules": count,
        "turns": turns,
        "minutes": round((_now() - began) / 60, 2),
        "known": {rule: number for rule, number in rules.items() if rule in KNOWN_RULES},
        "findings": {rule: number for rule, number in rules.items() if rule not in KNOWN_RULES},
        "calls": CALLS,
        "faults": disk().reached,
        "previous_release": PREVIOUS,
        "advice_followed": FOLLOWED,
        "advice_ignored": IGNORED,
        "operations_per_second": round((CALLS.total() + disk().reached.total()) / max(_now() - began, 1e-9)),
    }


def _rules(schedule: Schedule) -> set[str]:
    """Return the rules that do not hold in a run."""
    return {found.rule for found in run(schedule)}


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
