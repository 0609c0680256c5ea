"""Runs the conformance kit against a program: ``python -m tests.conformance [OPTIONS] PROGRAM [ARGS...]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from tests.conformance import following, forms, fuzz, golden, logs, manifests, parts, raw_ids
from tests.conformance.case import Case
from tests.conformance.program import Command, Program


def all_cases() -> Iterator[Case]:
    """Yield all cases but those of the fuzz corpus."""
    return chain(
        golden.cases(),
        manifests.cases(),
        parts.cases(),
        forms.cases(),
        raw_ids.cases(),
        logs.cases(),
        following.cases(),
    )


def faults(program: Program, cases: Iterable[Case], jobs: int = 1) -> Iterator[tuple[Case, str]]:
    """Run cases, and yield each with what the program did wrong, which is empty if it passed."""

    def run(case: Case) -> tuple[Case, str]:
        with tempfile.TemporaryDirectory(prefix="conformance-") as root:
            return case, case.fault(program, Path(root))

    if jobs == 1:
        yield from map(run, cases)
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run, cases)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--only", metavar="WORD", action="append", default=[], help="cases with this word; repeatable")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="also run N random mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--list", action="store_true", help="list the cases with their rules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM [ARGS...]")
    args = parser.parse_args(argv)
    cases = [
        case
        for case in chain(all_cases(), fuzz.cases(args.fuzz, args.seed))
        if all(word in case.name for word in args.only)
    ]
    if args.list:
        for case in cases:
            print(f"{case.name}: {case.rule}")
        return 0
    if not args.command or not cases:
        parser.error("no program" if cases else f"no case has the words {args.only}")
    start, num_failed = time.monotonic(), 0
    for case, fault in faults(Command(args.command), cases, args.jobs):
        if fault:
            num_failed += 1
            print(f"FAILED {case.name}: {fault}\n       rule: {case.rule}", flush=True)
    print(f"{len(cases) - num_failed} of {len(cases)} cases passed in {time.monotonic() - start:.1f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
