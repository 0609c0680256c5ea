"""The command line in an environment without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_tracker.cli.commands import commands
from tests.cli.commands import make, url_of

_ROOT = Path(__file__).parent.parent.parent
_NEEDS_TORCH = {
    "compact": [],
    "demo": None,
    "diff": ["1", "2"],
    "export": ["--version", "2", "--out", "OUT"],
    "plan": None,
    "sink": ["redis://127.0.0.1:1/0"],
    "verify": [],
}
_READS = {
    "inspect": [],
    "tail": ["--count", "1"],
    "top": ["--once"],
    "fleet": [],
    "report": ["--out", "OUT"],
    "takeover": ["--force"],
    "rollback": ["2"],
    "mirror": ["DIRECTORY", "--once"],
    "exporter": ["--every", "0"],
    "assets": None,
    "release": [],
}


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without torch: ``folder`` gets a module of this name that cannot be imported."""
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(_ROOT)])}
    call = [sys.executable, *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_every_command_is_here() -> None:
    assert {*_READS, *_NEEDS_TORCH} == {*commands.commands}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return url_of(make(tmp_path / "stream"))


@pytest.mark.parametrize("name", _READS)
def test_a_command_that_reads_works(name: str, url: str, tmp_path: Path) -> None:
    own = _READS[name]
    places = {"OUT": str(tmp_path / "out"), "DIRECTORY": (tmp_path / "copy").as_uri()}
    arguments = ["alerts"] if own is None else [url, *(places.get(each, each) for each in own)]
    done = _run(tmp_path, "-m", "delta_tracker.cli", name, *arguments)
    expected = {"exporter": (2, "--every"), "release": (2, "it is not pinned")}
    code, words = expected.get(name, (0, ""))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    if name == "report":
        assert "rows of the versions were not read" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("name", _NEEDS_TORCH)
def test_another_command_says_what_to_install(name: str, url: str, tmp_path: Path) -> None:
    own = _NEEDS_TORCH[name]
    arguments = [] if own is None else [url, *(str(tmp_path / "x") if each == "OUT" else each for each in own)]
    done = _run(tmp_path, "-m", "delta_tracker.cli", name, *arguments)
    assert done.returncode == 2
    assert "[torch]" in done.stderr


def test_a_class_of_the_package_says_what_to_install(tmp_path: Path) -> None:
    done = _run(tmp_path, "-c", "import delta_tracker; delta_tracker.Predictor")
    assert "MissingExtraError: the package 'torch' is not installed" in done.stderr
    assert "[torch]" in done.stderr
