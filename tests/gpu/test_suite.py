"""`make test-gpu` runs every file of this folder, and the README lists what needs a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.devices import MISSING
from tests.gpu.parts import PARTS

_ROOT = Path(__file__).parent.parent.parent


def test_each_file_is_in_one_part_and_the_parts_take_ten_minutes_at_most() -> None:
    files = [str(path.relative_to(_ROOT)) for path in Path(__file__).parent.rglob("test_*.py")]
    files.remove("tests/gpu/test_suite.py")
    listed = [path for part in PARTS for path in part.paths]
    assert sorted([*files, "tests/contract/test_row_sets.py"]) == sorted(listed)
    assert sum(part.seconds for part in PARTS) < 600
    for part in PARTS:
        assert part.needs_fbgemm == any("fbgemm" in path for path in part.paths)


def test_the_readme_lists_what_the_simulated_device_cannot_run() -> None:
    readme = (_ROOT / "tests" / "README.md").read_text()
    for name, description in MISSING.items():
        assert f"| {name} | {description} |" in readme, name
