"""Tests by area: ``python -m tests.areas AREA ...`` runs those of folders of ``delta_tracker/`` and ``tests/``.

An area has the examples in ``delta_tracker/AREA/``, the tests in ``tests/AREA/``, and the contract tests that import
that package. The area ``root`` has the files directly in both folders. ``python -m tests.areas --minutes REPORT``
writes the minutes into the table of ``.github/CONTRIBUTING.md``, from a report of pytest's option ``--junitxml``.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

_ROOT = Path(__file__).parent.parent
_TABLE = _ROOT / ".github" / "CONTRIBUTING.md"
_PYTEST = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
_NUM_WORKERS = 2


@cache
def areas() -> dict[str, list[str]]:
    """Return the paths that pytest runs for each area."""
    folders = {path.parent.name for path in _ROOT.glob("delta_tracker/*/*.py")}
    folders |= {path.relative_to(_ROOT).parts[1] for path in _ROOT.glob("tests/*/**/test_*.py")}
    contracts = {_name(path): path.read_text() for path in sorted(_ROOT.glob("tests/contract/test_*.py"))}
    found = {"root": [_name(path) for name in ("delta_tracker/*.py", "tests/test_*.py") for path in _ROOT.glob(name)]}
    for area in sorted(folders):
        paths = [path for path in (f"delta_tracker/{area}", f"tests/{area}") if (_ROOT / path).exists()]
        found[area] = paths + [path for path, text in contracts.items() if f"delta_tracker.{area}." in text]
    return found


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


def areas_of(path: str) -> list[str]:
    """Return the areas that run a test file."""
    return [area for area, paths in areas().items() if any(Path(path).is_relative_to(each) for each in paths)]


def minutes(report: Path) -> dict[str, int]:
    """Return the minutes of each area on two idle cores, rounded up, from the seconds of its tests in a report."""
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        names = (f"{'/'.join(parts[:size])}.py" for size in range(2, len(parts) + 1))
        path = next(name for name in names if (_ROOT / name).exists())
        for area in areas_of(path):
            seconds[area] += float(case.attrib["time"])
    return {area: math.ceil(total / _NUM_WORKERS / 60) for area, total in seconds.items()}


def rows(text: str) -> dict[str, int]:
    """Return the minutes of each area in the table of a document."""
    return {area: int(number) for area, number in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, flags=re.MULTILINE)}


def _write_minutes(report: Path) -> None:
    text = _TABLE.read_text()
    for area, number in minutes(report).items():
        text = re.sub(rf"^\| `{area}` \| \d+ \|", f"| `{area}` | {number} |", text, flags=re.MULTILINE)
    _TABLE.write_text(text)


def main(arguments: list[str]) -> int:
    """Run areas, or write the table; return the exit code."""
    if arguments[:1] == ["--minutes"]:
        _write_minutes(Path(arguments[1]))
        return 0
    unknown = [area for area in arguments if area not in areas()]
    if unknown or not arguments:
        problem = f"unknown area: {', '.join(unknown)}" if unknown else "AREA is missing"
        print(f"{problem}. Run `make test-area AREA=NAME` with one of: {', '.join(areas())}", file=sys.stderr)
        return 2
    paths = dict.fromkeys(path for area in arguments for path in areas()[area])
    return subprocess.run([sys.executable, *_PYTEST, *paths], cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
