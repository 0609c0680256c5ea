"""Run every case against TorchRec's tracker and this library's: ``python -m benchmarks.faults``.

The exit code is 0 if this library's tracker is right in all cases, otherwise 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults.ranks import load_cases, run_all
from benchmarks.faults.registry import FAULTS, RIGHT

OURS = "delta_tracker"
THEIRS = "TorchRec"

Results = dict[int, dict[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the table.

    Args:
        argv: command line arguments; None for those of the process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown; - for standard output")
    parser.add_argument("--json", action="store_true", help="write the results to standard output as JSON")
    parser.add_argument("--faults", type=int, nargs="+", choices=FAULTS, metavar="N", help="run only these faults")
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="number of cases to run concurrently")
    arguments = parser.parse_args(argv)
    results = run(arguments.faults or list(FAULTS), arguments.parallel)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(results, indent=2, ensure_ascii=False)}\n")
    if arguments.markdown == "-":
        sys.stdout.write(markdown(results))
    elif arguments.markdown:
        Path(arguments.markdown).write_text(markdown(results))
    if not arguments.json and arguments.markdown != "-":
        show(results)
    return 0 if all(result[OURS] == RIGHT for result in results.values()) else 1


def run(faults: Sequence[int], num_parallel: int) -> Results:
    """Run all cases of some faults.

    Returns:
        Fault to tracker to verdict: ``right``, or a list of the errors.
    """
    cases = {name: case for name, case in load_cases().items() if case.fault in faults}
    jobs = [(name, tracker) for name in cases for tracker in (THEIRS, OURS)]
    verdicts = dict(run_all(jobs, num_parallel))
    results: Results = {}
    for fault in sorted(set(faults)):
        names = [name for name, case in cases.items() if case.fault == fault]
        results[fault] = {tracker: _together([verdicts[name, tracker] for name in names]) for tracker in (THEIRS, OURS)}
    return results


def _together(verdicts: Sequence[str]) -> str:
    wrong = list(dict.fromkeys(verdict for verdict in verdicts if verdict != RIGHT))
    return "; ".join(wrong) or RIGHT


def rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table."""
    header = ["", "fault of TorchRec's tracker", f"TorchRec {version('torchrec').partition('+')[0]}", OURS]
    return header, [
        [str(fault), FAULTS[fault], *(result[tracker] for tracker in (THEIRS, OURS))]
        for fault, result in results.items()
    ]


def markdown(results: Results) -> str:
    """Return the table for benchmarks/faults/README.md."""
    header, lines = rows(results)
    table = [header, ["---"] * len(header), *([_escaped(cell) for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def show(results: Results) -> None:
    """Print the table to the terminal."""
    header, lines = rows(results)
    if importlib.util.find_spec("rich") is None:
        for line in [header, *lines]:
            sys.stdout.write(f"{line[0]:>2}  {line[1]}\n" + f"    {line[2]}  |  {line[3]}\n")
        return
    from rich.console import Console  # noqa: PLC0415  optional
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*header, show_lines=True)
    for line in lines:
        styles = ["", "", *("green" if cell == RIGHT else "red" for cell in line[2:])]
        table.add_row(*(Text(cell, style) for cell, style in zip(line, styles, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
