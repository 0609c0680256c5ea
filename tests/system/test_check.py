"""``make check``: the tests of what changed run in a fork each, for a limited time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.alone import runs
from tests.areas import areas, minutes, rows

_ROOT = Path(__file__).parent.parent.parent
_FILES = {
    "delta_tracker/__init__.py": "",
    "delta_tracker/flow/valve.py": "OPEN = 1\n",
    "delta_tracker/flow/pump.py": "",
    "tests/__init__.py": "",
    "tests/flow/test_valve.py": "from delta_tracker.flow.valve import OPEN\n\ndef test_open():\n    assert OPEN == 1\n",
    "tests/flow/test_pump.py": "def test_pump():\n    raise AssertionError\n",
    ".gitignore": "__pycache__\n",
}


def _git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two modules, whose tests are like ours; the tests of one of them fail."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("alone", "areas", "changed", "check"):
        shutil.copy(_ROOT / "tests" / f"{name}.py", tmp_path / "tests")
    return tmp_path


def _check(project: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.check", *arguments]
    done = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_tests_of_what_changed_run(project: Path) -> None:
    _git(project, "init", "--initial-branch", "main")
    _git(project, "add", ".")
    _git(project, "commit", "-m", "Begin")
    status, output = _check(project)
    assert (status, output.splitlines()[0][:26]) == (0, "Nothing differs from HEAD.")
    (project / "delta_tracker/flow/valve.py").write_text("OPEN = 2 - 1\n")
    (project / "NOTES").write_text("")
    status, output = _check(project)
    assert (status, "1 test files passed" in output) == (0, True), output
    assert output.endswith("run `make test`: NOTES\n")
    (project / "delta_tracker/flow/valve.py").rename(project / "delta_tracker/flow/gate.py")
    _git(project, "add", ".")
    _git(project, "commit", "-m", "Move a module")
    status, output = _check(project, "HEAD~1")
    assert (status, "No module named 'delta_tracker.flow.valve'" in output) == (1, True), output
    _git(project, "branch", "before", "HEAD~1")
    _git(project, "branch", "--set-upstream-to", "before")
    assert _check(project)[0] == 1


def test_without_git_the_message_names_other_targets(project: Path) -> None:
    status, output = _check(project)
    assert (status, "make test-area AREA=" in output) == (2, True), output


def test_what_is_not_complete_in_time_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import time, pathlib, pytest\n"
        "@pytest.fixture\n"
        "def opened():\n"
        f"    path = pathlib.Path({str(tmp_path / 'open')!r})\n"
        "    try:\n        path.touch()\n        yield\n"
        "    finally:\n        path.unlink()\n"
        "def test_long(opened):\n    time.sleep(600)\n"
    )
    (tmp_path / "test_next.py").write_text("def test_next():\n    pass\n")
    begin = time.monotonic()
    paths = [str(tmp_path / f"test_{name}.py") for name in ("long", "next")]
    assert [(run.path, run.status) for run in runs(paths, seconds=5)] == [(path, None) for path in paths]
    assert time.monotonic() - begin < 300
    assert not (tmp_path / "open").exists()


def test_the_minutes_of_areas_are_those_of_a_report(tmp_path: Path) -> None:
    cases = [
        ("tests.predictor.test_gate", 70),
        ("delta_tracker.predictor.gate", 60),
        ("tests.contract.test_row_sinks", 20),
        ("tests.test_house", 1),
    ]
    lines = [f'<testcase classname="{name}" name="test" time="{seconds}"/>' for name, seconds in cases]
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    assert minutes(tmp_path / "report.xml") == {"predictor": 2, "contract": 1, "sinks": 1, "root": 1}


def test_the_guide_for_contributors_has_the_minutes_of_each_area() -> None:
    assert areas().keys() <= rows((_ROOT / ".github" / "CONTRIBUTING.md").read_text()).keys()


def test_each_area_runs_tests_and_an_unknown_one_is_rejected() -> None:
    assert {path.name for path in (_ROOT / "delta_tracker").iterdir() if (path / "__init__.py").exists()} <= set(
        areas()
    )
    assert all(any(path.startswith("tests/") for path in paths) for paths in areas().values())
    command = [sys.executable, "-m", "tests.areas", "predictor", "predicting"]
    done = subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "unknown area: predicting. Run `make test-area AREA=NAME` with one of: " + ", ".join(areas()) + "\n",
    )
