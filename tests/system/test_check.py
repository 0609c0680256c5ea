"""``make check``: the tests of what changed run in a fork each, for a limited time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.alone import Run, runs
from tests.areas import areas, minutes, rows
from tests.check import base_of, changed_since, main

_ROOT = Path(__file__).parent.parent.parent
_FILES = {
    "delta_tracker/__init__.py": "",
    "delta_tracker/flow/valve.py": "OPEN = 1\n",
    "delta_tracker/flow/pump.py": "",
    "tests/__init__.py": "",
    "tests/flow/test_valve.py": "from delta_tracker.flow.valve import OPEN\n\ndef test_open():\n    assert OPEN == 1\n",
    # A failure counts although its file is not complete in time.
    "tests/flow/test_pump.py": (
        "import time\n\ndef test_pump():\n    raise AssertionError\n\ndef test_long():\n    time.sleep(600)\n"
    ),
    ".gitignore": "__pycache__\n",
}


def _git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two modules, whose tests are like ours; the tests of one of them fail."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("alone", "areas", "changed", "check"):
        shutil.copy(_ROOT / "tests" / f"{name}.py", tmp_path / "tests")
    return tmp_path


def _commit(project: Path) -> None:
    _git(project, "add", ".")
    _git(project, "commit", "-m", "Change")


def test_what_changed_since_the_last_commit_or_upstream(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], project) == 2
    assert re.fullmatch(r"git does not know .+\nRun .+ `make test-area AREA=\.\.\.`\.\n", capsys.readouterr().err)
    _git(project, "init", "--initial-branch", "main")
    _commit(project)
    assert main([], project) == 0
    assert capsys.readouterr().out.startswith("Nothing differs from HEAD.")
    _git(project, "checkout", "--track", "-b", "change")
    (project / "delta_tracker/flow/valve.py").rename(project / "delta_tracker/flow/gate.py")
    _commit(project)
    moved = {"delta_tracker/flow/valve.py", "delta_tracker/flow/gate.py"}
    assert changed_since(project, base_of(project)) == moved
    (project / "tests/flow/test_pump.py").unlink()
    (project / "a b").write_text("")
    assert changed_since(project, base_of(project)) == {*moved, "tests/flow/test_pump.py", "a b"}
    assert changed_since(project, "HEAD") == {"tests/flow/test_pump.py", "a b"}
    _git(project, "checkout", "main", "--force")
    (project / "delta_tracker/flow/pump.py").write_text("SPEED = 2\n")
    _commit(project)
    _git(project, "checkout", "change")
    assert changed_since(project, base_of(project)) == moved, "not what changed upstream"


def test_the_tests_of_what_changed_run(project: Path) -> None:
    _git(project, "init")
    _commit(project)
    for name in ("delta_tracker/flow/valve.py", "delta_tracker/flow/pump.py", "NOTES"):
        (project / name).write_text("OPEN = 2 - 1\n")
    done = forked.run("tests.check", timeout_seconds=280, root=project)
    assert done.returncode == 1, done.stderr
    assert "1 test files passed and 1 failed" in done.stdout
    assert done.stdout.endswith("run `make test`: NOTES\n")


def test_what_is_most_important_of_what_was_left_out_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.check.runs", lambda paths, *_, **__: [Run(path, None, 0, "") for path in paths])
    _git(project, "init")
    _commit(project)
    (project / "delta_tracker/flow/pump.py").write_text("SPEED = 2\n")
    (project / "tests/flow/test_valve.py").write_text("from delta_tracker.flow import valve, pump\n")
    (project / "tests/flow/test_flow.py").write_text("from delta_tracker.flow import valve, pump\n")
    _git(project, "add", "tests/flow/test_flow.py")
    _git(project, "commit", "-m", "Change", "tests/flow/test_flow.py")
    assert main([], project) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("`.venv/bin/python -m pytest tests/flow/test_valve.py tests/flow/test_pump.py`.")


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
    assert [(run.path, run.status) for run in runs(paths, seconds=2)] == [(path, None) for path in paths]
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
    assert areas().keys() == rows((_ROOT / ".github" / "CONTRIBUTING.md").read_text()).keys()


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
