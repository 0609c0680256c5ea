"""Run all benchmarks in turn, then fill the table of benchmarks/README.md: ``python -m benchmarks``.

Each runs in its own process, with its own settings of torch and its own memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import summary
from benchmarks.harness import RESULTS

PROGRAMS: dict[str, list[str]] = {
    "bench_store": [],
    "bench_step": [],
    "bench_read": [],
    "bench_publish": ["--rows", "2000000", "--repeats", "5"],
    "bench_predict": [],
    "bench_freshness": [],
    "bench_quality": [],
    "bench_journey": [],
    "bench_optimizers": [],
    "bench_sinks": [],
    "bench_recovery": [],
    "bench_fleet": [],
    "growth": [],
    "bench_alternatives": [],
}
"""Arguments of each program."""
PRINTING: dict[str, list[str]] = {
    "bench_checkpoint": ["--repeats", "3"],
    "bench_monitor": [],
    "bench_step_metrics": [],
}
"""Programs that print their results, which are saved to a file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Return 0 if all of them succeeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these; the table has all results")
    chosen = parser.parse_args(argv).names or [*PROGRAMS, *PRINTING]
    failed = [name for name in chosen if not _run(name)]
    summary.main()
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return bool(failed)


def _run(name: str) -> bool:
    """Run one benchmark. Return True if it succeeded."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", *{**PROGRAMS, **PRINTING}[name]]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own
    if name in PRINTING and done.returncode == 0:
        (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{done.stdout}")
    sys.stdout.write(f"{done.stdout}\n{name}: {time.perf_counter() - begin:.0f} s, exit code {done.returncode}\n\n")
    sys.stdout.flush()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
