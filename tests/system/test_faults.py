"""The comparison with TorchRec's own tracker runs once, and benchmarks/faults/README.md has its table."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import ranks
from benchmarks.faults.__main__ import main, markdown
from benchmarks.faults.registry import CASES, FAULTS, RIGHT, case, expect
from tests import forked

_ROOT = Path(__file__).parent.parent.parent
_NUM_THEIRS_AT_LEAST = 15

# Other versions have another interface or lack modules of some cases; the comparison is with the pinned version.
_IS_PINNED = importlib.util.find_spec("torchrec") is not None and version("torchrec").startswith("1.9.")
pytestmark = [
    pytest.mark.skipif(not _IS_PINNED, reason="compares with torchrec 1.9"),
    pytest.mark.timeout(900),  # on a busy machine
]


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, str]]:
    done = forked.run("benchmarks.faults", "--json", timeout_seconds=850)
    assert done.stdout, done.stderr
    found = {int(fault): result for fault, result in json.loads(done.stdout).items()}
    assert done.returncode == int(any(result["delta_tracker"] != RIGHT for result in found.values()))
    return found


def test_every_fault_is_tried(results: dict[int, dict[str, str]]) -> None:
    assert list(results) == list(FAULTS) == list(range(1, 19))


def test_ours_is_right(results: dict[int, dict[str, str]]) -> None:
    assert {fault: result["delta_tracker"] for fault, result in results.items()} == dict.fromkeys(FAULTS, RIGHT)


def test_the_cases_find_defects(results: dict[int, dict[str, str]]) -> None:
    wrong = [fault for fault, result in results.items() if result["TorchRec"] != RIGHT]
    assert len(wrong) >= _NUM_THEIRS_AT_LEAST
    assert not any("the case" in verdict for result in results.values() for verdict in result.values())


def test_the_readme_has_this_table(results: dict[int, dict[str, str]]) -> None:
    readme = (_ROOT / "benchmarks" / "faults" / "README.md").read_text()
    found = re.search(r"<!-- faults -->\n(.*?)<!-- /faults -->", readme, flags=re.DOTALL)
    assert found, "put the output of `python -m benchmarks.faults --markdown -` between the markers"
    assert found[1].strip() == markdown(results).strip()


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {("read_nothing", "TorchRec"): "raises | *", ("read_nothing", "delta_tracker"): RIGHT}
    monkeypatch.setattr("benchmarks.faults.__main__.run_all", lambda jobs, num_parallel: verdicts.items())
    table = tmp_path / "table.md"
    assert main(["--faults", "3", "--markdown", str(table)]) == 0
    assert "right" in capsys.readouterr().out
    assert table.read_text().splitlines()[2] == f"| 3 | {FAULTS[3]} | raises \\| \\* | right |"
    assert main(["--faults", "3", "--markdown", "-"]) == 0
    assert capsys.readouterr().out == table.read_text()
    verdicts["read_nothing", "delta_tracker"] = "loses 1 rows"
    assert main(["--faults", "3", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"3": {"TorchRec": "raises | *", "delta_tracker": "loses 1 rows"}}


def test_a_rank_that_dies_or_hangs_affects_no_other_case(tmp_path: Path) -> None:
    """Run a separate program with cases that die and hang on rank 1."""
    (tmp_path / "bad_cases.py").write_text(
        "import os, time\n"
        "from torch import distributed as dist\n"
        "from benchmarks.faults.registry import case\n"
        "@case(3, num_ranks=2)\n"
        "def dies(make):\n"
        "    if dist.get_rank() == 1:\n        os.abort()\n"
        "@case(3, num_ranks=2)\n"
        "def hangs(make):\n"
        "    if dist.get_rank() == 1:\n        time.sleep(60)\n"
        "@case(3)\n"
        "def fine(make):\n"
        "    pass\n"
    )
    (tmp_path / "program.py").write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from benchmarks.faults import ranks\n"
        "ranks.CASE_MODULES = ('bad_cases',)\n"
        "class Run(ranks._Run):\n"  # on a busy machine, other ranks may be slow
        "    def is_over(self):\n"
        "        if self.job[0] != 'hangs' or 0 in self.pipes:\n"
        "            self._deadline = time.monotonic() + ranks._CASE_SECONDS\n"
        "        return super().is_over()\n"
        "ranks._Run, ranks._CASE_SECONDS = Run, 3\n"
        "ranks.load_cases()\n"
        "for job, verdict in ranks.run_all([(name, 'TorchRec') for name in ('dies', 'hangs', 'fine')], 2):\n"
        "    print(*job, verdict)\n"
    )
    done = forked.run(str(tmp_path / "program.py"), timeout_seconds=850)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "dies TorchRec rank 1: the process dies",
        "fine TorchRec right",
        "hangs TorchRec rank 1: hangs",
    ]


def test_errors_are_summarized_in_a_few_words() -> None:
    assert ranks.describe(KeyError("t")) == "KeyError: 't'"
    assert ranks.describe(ValueError()) == "ValueError"
    assert ranks.describe(ValueError("x" * 100)) == f"ValueError: {'x' * 70}…"
    assert ranks.describe(RuntimeError("[gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1")) == (
        "waits for a dead peer"
    )


def test_case_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "own", None)

    @case(1)
    def own(make: Callable[..., Any]) -> None:
        expect(make is not None, "nothing to make")

    assert CASES["own"].run is own
    with pytest.raises(AssertionError, match="nothing to make"):
        CASES["own"].run(None)
