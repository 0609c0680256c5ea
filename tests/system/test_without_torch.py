"""The command line in an environment without torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_tracker.cli.commands import commands
from tests.cli.commands import make, path_of
from tests.interpreter import Interpreter, interpreter

_NEEDS_TORCH = {
    "compact": [],
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


_RUN = """
import os, sys
from delta_tracker.cli.main import main

sys.stdout = open(os.devnull, "w")
code = main(sys.argv[1:])
os.write(1, f"exit code {code}".encode())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Interpreter]:
    with interpreter("click", "numpy", "obstore.store", "rich.table") as each:
        yield each


@pytest.fixture
def run(server: Interpreter, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs Python without torch: a module of this name in a folder cannot be imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    check = "import sys\nassert 'torch' not in sys.modules\n"
    return lambda program, *argv: server.run(f"{check}sys.argv[1:] = {argv!r}\n{program}", [folder])


def test_every_command_is_here() -> None:
    assert {*_READS, *_NEEDS_TORCH} == {*commands.commands}


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return path_of(make(tmp_path_factory.mktemp("streams") / "stream"), "")


@pytest.fixture
def url(stream: Path, tmp_path: Path) -> str:
    return shutil.copytree(stream, tmp_path / "stream").as_uri()


@pytest.mark.parametrize("name", _READS)
def test_a_command_that_reads_works(name: str, url: str, tmp_path: Path, run: Callable[..., str]) -> None:
    own = _READS[name]
    places = {"OUT": str(tmp_path / "out"), "DIRECTORY": (tmp_path / "copy").as_uri()}
    arguments = ["alerts"] if own is None else [url, *(places.get(each, each) for each in own)]
    errors = run(_RUN, name, *arguments)
    expected = {"exporter": (2, "--every"), "release": (2, "it is not pinned")}
    code, words = expected.get(name, (0, ""))
    assert errors.endswith(f"exit code {code}")
    assert words in errors
    if name == "report":
        assert "rows of the versions were not read" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("name", _NEEDS_TORCH)
def test_another_command_says_what_to_install(name: str, url: str, tmp_path: Path, run: Callable[..., str]) -> None:
    own = _NEEDS_TORCH[name]
    arguments = [] if own is None else [url, *(str(tmp_path / "x") if each == "OUT" else each for each in own)]
    errors = run(_RUN, name, *arguments)
    assert errors.endswith("exit code 2")
    assert "[torch]" in errors


def test_a_class_of_the_package_says_what_to_install(run: Callable[..., str]) -> None:
    program = """
import delta_tracker
try:
    delta_tracker.Predictor
except delta_tracker.errors.MissingExtraError as error:
    print(error)
"""
    said = run(program)
    assert "the package 'torch' is not installed" in said
    assert "[torch]" in said
