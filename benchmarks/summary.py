"""Write the tables of targets and alternatives into the documents: ``python -m benchmarks.summary``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.targets import TARGETS, Results, Target

README = Path(__file__).parent / "README.md"
COMPARISON = README.parent.parent / "delta_tracker" / "guide" / "compare.md"
_ALTERNATIVES = {
    "delta_tracker": "this library",
    "torch.save": "`torch.save` of the table",
    "dcp.async_save": "`dcp.async_save` of the table",
    "TorchRec's tracker and files": "TorchRec's tracker, and a safetensors file for each delta",
    "rows to Redis": "rows set in Redis by the trainer",
}


def markdown(directory: Path, targets: Iterable[Target] = TARGETS) -> str:
    """Return the table of all targets, from the results in a directory, and lines on the runs."""
    results = Results(directory)
    lines = ["| work | target | measured | met |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {' | '.join(_cells(target, results))} |" for target in targets]
    return "\n".join([*lines, "", *_runs(directory), ""])


def alternatives(directory: Path) -> str:
    """Return the table of this library and its alternatives, from the results in a directory."""
    results = Results(directory)
    settings = json.loads((directory / "bench_alternatives.json").read_text())["settings"]
    versions = settings["batches"] // settings["batches per version"]
    lines = [
        "| way | freshness p50, p99, ms | MB per version | step / untracked | wrong rows after kill -9 and a restart |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case, way in _ALTERNATIVES.items():
        half, most, num_bytes = (
            results.median("bench_alternatives", case, figure) for figure in ("p50", "p99", "bytes")
        )
        step = results.median_ratio("bench_alternatives", case, "no tracking", "step")
        wrong = results.median("bench_alternatives", f"{case}, killed", "wrong rows")
        lines.append(
            f"| {way} | {half * 1e3:.0f}, {most * 1e3:.0f} | {num_bytes / versions / 1e6:.1f} |"
            f" {step:.2f} | {wrong:,.0f} |"
        )
    return "\n".join([*lines, ""])


def _cells(target: Target, results: Results) -> tuple[str, str, str, str]:
    bound = f"{'≥' if target.is_least else '≤'} {target.text.format(target.bound)}"
    try:
        figure = target.measure(results)
    except LookupError:
        return target.work, bound, "", "not measured"
    shown = target.text.format(figure)
    if target.is_met(figure):
        return target.work, bound, shown, "yes"
    missed = figure / target.bound if target.bound else float("inf")
    return target.work, bound, shown, f"no: {missed:.2f} of the target"


def _runs(directory: Path) -> list[str]:
    """Return a line on each machine and day of the results: the programs that ran there, and the load before them."""
    runs: dict[str, list[tuple[str, str, float]]] = {}
    for path in sorted(directory.glob("*.json")):
        place = json.loads(path.read_text())["environment"]
        machine = f"{place['cores']} cores ({place['processor']}), torch {place['torch']}"
        day, time = place["date"].split(maxsplit=1)
        runs.setdefault(f"{day}, {machine}", []).append((path.stem, time.removesuffix(" UTC"), place["load_before"]))
    return [
        f"- {where}, load {min(load for *_, load in each)} to {max(load for *_, load in each)} before each run:"
        f" {', '.join(f'`{name}` {time}' for name, time, _ in each)} (UTC)."
        for where, each in runs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write each table between its markers."""
    assert not argv, "no arguments"
    _fill(README, "benchmarks", markdown(RESULTS))
    _fill(COMPARISON, "alternatives", alternatives(RESULTS))
    return 0


def _fill(document: Path, name: str, table: str) -> None:
    text = document.read_text()
    section = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    assert section.search(text), f"{document} has no markers for the table of {name}"
    document.write_text(section.sub(lambda _: table, text))


if __name__ == "__main__":
    raise SystemExit(main())
