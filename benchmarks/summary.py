"""Write the table of targets into benchmarks/README.md: ``python -m benchmarks.summary``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.targets import TARGETS, Results, Target

README = Path(__file__).parent / "README.md"
_SECTION = re.compile(r"(?<=<!-- benchmarks -->\n).*?(?=<!-- /benchmarks -->)", re.DOTALL)


def markdown(directory: Path, targets: Iterable[Target] = TARGETS) -> str:
    """Return the table of all targets, from the results in a directory, and a line on each run."""
    results = Results(directory)
    lines = ["| work | target | measured | met |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {' | '.join(_cells(target, results))} |" for target in targets]
    return "\n".join([*lines, "", *_runs(directory), ""])


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
    """Return a line on each file of results: date, machine, load."""
    lines = []
    for path in sorted(directory.glob("*.json")):
        place = json.loads(path.read_text())["environment"]
        lines.append(
            f"- `{path.stem}`: {place['date']}, {place['cores']} cores ({place['processor']}), load"
            f" {place['load_before']} before and {place['load_after']} after, torch {place['torch']}."
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table between its markers in benchmarks/README.md."""
    assert not argv, "no arguments"
    readme = README.read_text()
    assert _SECTION.search(readme), f"{README} has no markers for the table"
    README.write_text(_SECTION.sub(lambda _: markdown(RESULTS), readme))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
