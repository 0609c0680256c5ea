"""Put known faults back, one at a time, and see which the world finds: ``python -m tests.simulation.put_back``.

``--seed`` draws ``--count`` faults of ``tests/reverts``; with words, only those whose defects or generators contain one
of them. First, a run of the unchanged code must have no finding. It also shows which functions the schedules call: a
fault in any other one is not run. Each of the rest then runs the same schedules, until the first finding or for
``--minutes``. One line says what a fault broke, and after how many operations, which are the calls of the library and
the faults in the middle of calls. The last line has the counts, and the median number of operations of those found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.reverts.every import all_reverts, apply
from tests.reverts.mutation import Mutation
from tests.reverts.revert import Revert

_ROOT = Path(__file__).parents[2]
_MORE_SECONDS = 240.0  # for the imports and the last schedule, on a busy machine
_NUM_SHOWN = 300  # characters of a finding


@dataclass(frozen=True)
class _Marks(Mutation):
    """The function creates a file in a folder when it is called."""

    folder: Path

    def _change(self, function: ast.FunctionDef) -> None:
        function.body[:0] = ast.parse(f"__import__('pathlib').Path({str(self.folder / self.function)!r}).touch()").body


class _Seen(NamedTuple):
    """Number of operations of a run, its first finding, and why it has no result; empty texts for none."""

    operations: int
    finding: str = ""
    failure: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drawn faults; return 1 if the unchanged code has a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.put_back", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of defects or generators, by default all")
    parser.add_argument("--seed", type=int, default=0, help="draws the faults and the schedules")
    parser.add_argument("--count", type=int, default=40, help="number of faults")
    parser.add_argument("--minutes", type=float, default=2.0, help="time of each run")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs at once")
    arguments = parser.parse_args(argv)
    words, reverts = arguments.words or [""], [each for each in all_reverts() if each[1].mutations]
    shuffled = random.Random(arguments.seed).sample(reverts, len(reverts))
    drawn = [each for generator, each in shuffled if any(word in each.defect + generator for word in words)]
    drawn = drawn[: arguments.count]
    first = 1_000_000 * arguments.seed
    with tempfile.TemporaryDirectory(prefix="called-") as folder:
        functions = sorted({mutation.function for each in drawn for mutation in each.mutations})
        unchanged = _run(Revert("", *(_Marks(each, Path(folder)) for each in functions)), first, arguments.minutes)
        called = {path.name for path in Path(folder).iterdir()}
    print(f"unchanged code, {unchanged.operations} operations: {unchanged.finding or unchanged.failure}", flush=True)
    if unchanged.finding or unchanged.failure:
        return 1
    counts, numbers = Counter[str](), list[int]()

    def seen_of(each: Revert) -> tuple[bool, _Seen]:
        is_called = any(mutation.function in called for mutation in each.mutations)
        return is_called, _run(each, first, arguments.minutes) if is_called else _Seen(0)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        for each, (is_called, seen) in zip(drawn, pool.map(seen_of, drawn), strict=True):
            result = "found" if seen.finding else seen.failure[:9] or ("not found" if is_called else "not called")
            numbers += [seen.operations] if seen.finding else []
            counts[result] += 1
            print(f"{result}, {seen.operations} operations, {each.defect}: {seen.finding or seen.failure}", flush=True)
    print(f"{dict(counts)}, median of those found: {statistics.median(numbers or [0]):.0f} operations")
    return 0


def _run(revert: Revert, first: int, minutes: float) -> _Seen:
    """Run the world on a copy of the code with a fault, from a first seed on."""
    with tempfile.TemporaryDirectory(prefix="put-back-") as folder:
        root = Path(folder)
        for name in ("delta_tracker", "tests"):
            shutil.copytree(_ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        apply(revert, root)
        options = ["--seed", str(first), "--minutes", str(minutes), "--stop", "--shrinks", "0"]
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "tests.simulation", *options],
                cwd=root,
                env={**os.environ, "PYTHONPATH": folder, "PYTHONHASHSEED": "0"},
                check=False,
                capture_output=True,
                text=True,
                timeout=60 * minutes + _MORE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return _Seen(0, failure="no end")
    if not done.stdout.endswith("}\n"):
        return _Seen(0, failure=f"no result: {done.stderr[-_NUM_SHOWN:]}")
    *said, counts = done.stdout.splitlines()
    findings = [each for each in said if each.startswith("seed ")]
    seen = json.loads(counts)
    num_operations = sum(seen["calls"].values()) + sum(seen["faults"].values())
    return _Seen(num_operations, findings[0][:_NUM_SHOWN] if findings else "")


if __name__ == "__main__":
    sys.exit(main())
