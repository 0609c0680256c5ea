"""Shared tools of the benchmarks: interleaved repeats, the environment, results as JSON and a Markdown table."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "numba", "obstore", "xxhash")

Figures = Mapping[str, float]
"""Name of a figure to its value, usually in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All repeats of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the median with a confidence of 95 %, for independent repeats of any distribution.

        The bounds are repeats: of ``n`` sorted ones, those about ``0.98 * sqrt(n)`` away from the middle, by the normal
        approximation of the binomial distribution (W. J. Conover, Practical Nonparametric Statistics, section 3.2).
        """
        ordered, half = sorted(self.values), 0.98 * math.sqrt(len(self.values))
        low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
        return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Format median and range, each multiplied by ``scale``: ``12.3 (11.9-14.0)``."""
        low, middle, high = (f"{each * scale:.{digits}f}" for each in (min(self.values), self.median, max(self.values)))
        return f"{middle} ({low}-{high})"


def interleaved(
    cases: Mapping[str, Callable[[], Figures]],
    *,
    repeats: int,
    warmups: int = 1,
    before_round: Callable[[], object] = lambda: None,
    before_case: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Sample]]:
    """Run all cases in rounds, so that other load on the machine affects them equally.

    Each round has a random order, because a case is slowed down by the dirty pages and cold caches of the previous one.

    Args:
        cases: name to a function that does the work once, times it, and returns the same figures each time. Its
            preparations and checks are not timed.
        repeats: number of counted rounds.
        warmups: number of uncounted rounds before them.
        before_round: called before each round.
        before_case: called before each case of a round.

    Returns:
        Name to figure to sample.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    names, order = list(cases), torch.Generator().manual_seed(0)
    for repeat in range(-warmups, repeats):
        before_round()
        for index in torch.randperm(len(names), generator=order).tolist():
            name = names[index]
            before_case()
            figures = cases[name]()
            if repeat >= 0:
                for figure, value in figures.items():
                    found[name].setdefault(figure, []).append(value)
    return {
        name: {figure: Sample(tuple(values)) for figure, values in figures.items()} for name, figures in found.items()
    }


def provide_pages(directory: Path, num_bytes: int) -> None:
    """Write and remove a file of ``num_bytes``, so that the system has free pages for files of that size.

    The host of a virtual machine reclaims free memory after a second or two and returns it slowly. On the machine of
    the committed results, a plain write of 264 MB took 60 ms right after such a file was removed, and 345 to 548 ms
    five to eight seconds later.
    """
    path, piece = directory / "pages", bytes(4 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, num_bytes, len(piece)):
            file.write(piece)
    path.unlink()


def timed(work: Callable[[], object]) -> Figures:
    """Measure the elapsed time and the processor time of one call.

    Returns:
        ``seconds``, and ``processor``, which other load on the machine affects less. Both are in seconds.
    """
    begin, processor = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}


def environment() -> dict[str, str | int | float]:
    """Return date, hardware, versions and load. The load shows how much other work the machine had."""
    record: dict[str, str | int | float] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }
    for package in _PACKAGES:
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            continue
    return record


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(slots=True, kw_only=True)
class Report:
    """Results of a benchmark.

    Args:
        name: name of the benchmark and of its files.
        settings: parameters of the run.
        columns: column titles of the table; the first column names the case.
        lines: rows of the table, a string per column.
        notes: sentences below the table.
        below: lines of further tables, below the notes.
        figures: all measured figures, for the JSON file.
        environment: machine, versions and load, by default those at construction.
    """

    name: str
    settings: Mapping[str, object]
    columns: Sequence[str]
    lines: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str | int | float] = field(default_factory=environment)

    def add(self, name: str, found: Mapping[str, Sample]) -> None:
        """Store all repeats of a case."""
        self.figures[name] = {figure: sample.values for figure, sample in found.items()}

    def markdown(self) -> str:
        """Return the table with its notes, settings and environment as Markdown."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        place = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        return "\n".join(
            [
                f"# {self.name}",
                "",
                _row(self.columns),
                _row(["---", *("---:" for _ in self.columns[1:])]),
                *map(_row, self.lines),
                "",
                *(f"- {note}" for note in self.notes),
                f"- Settings: {settings}.",
                f"- Environment: {place}.",
                *self.below,
                "",
            ]
        )

    def finish(self, directory: Path | None) -> None:
        """Print the table. Unless ``directory`` is None, write it and a JSON file of all repeats."""
        self.environment["load_after"] = round(os.getloadavg()[0], 1)
        sys.stdout.write(self.markdown())
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        record = {"settings": self.settings, "environment": self.environment, "figures": self.figures}
        (directory / f"{self.name}.json").write_text(json.dumps(record, indent=1) + "\n")
        (directory / f"{self.name}.md").write_text(self.markdown())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _directory(text: str) -> Path:
    """Return the path of an existing directory, for an option: a benchmark finds out before it has run."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {text}. Create it first")
    return Path(text)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the common options ``--tiny``, ``--repeats``, ``--out`` and ``--work``."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--tiny", action="store_true", help="run once with few rows, to test the benchmark itself")
    made.add_argument("--repeats", type=int, help="number of timed runs of each case")
    made.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    made.add_argument(
        "--work", type=_directory, help="directory for streams, on the disk to measure; default: temporary"
    )
    return made
