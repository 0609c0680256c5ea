"""The README: its tables, its commands, and the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import click

from delta_tracker import errors
from delta_tracker.cli.commands import commands
from tests import promises

_ROOT = Path(__file__).parent.parent

_README = (_ROOT / "README.md").read_text()

_BLOCKS = re.findall(r"```(\w+)\n(.*?)```", _README, flags=re.DOTALL)

_PYTHON = [text for language, text in _BLOCKS if language == "python"]


def test_the_quickstart_has_fifteen_lines() -> None:
    assert len([line for line in _PYTHON[0].splitlines() if line]) <= 15


def test_commands_are_targets_of_the_makefile() -> None:
    commands = [line for language, text in _BLOCKS if language == "sh" for line in text.splitlines()]
    assert commands == ["make demo", "make test"]
    makefile = (_ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, flags=re.MULTILINE)


def test_every_promise_is_shown_by_a_test() -> None:
    shown = promises.shown_by()
    assert shown.keys() == promises.PROMISES.keys(), "a marker names no promise"
    assert all(shown.values())
    assert promises.table_of(_README) == promises.markdown(), "run python -m tests.promises"


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"\]\((?!http)([^)#]+)\)|`((?:tests|delta_tracker|examples)/[\w/.-]+)`", _README))
    for name in filter(None, (part for pair in named for part in pair)):
        assert (_ROOT / name).exists(), name


def _rows(title: str) -> set[str]:
    """The first words in backticks of each row in the tables of a section."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## )", _README, flags=re.DOTALL | re.MULTILINE)
    assert section is not None, title
    firsts = re.findall(r"^\| (`[^|]+) \|", section[1], flags=re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}


def test_every_error_has_a_cause_and_a_remedy() -> None:
    bases = {errors.DeltaTrackerError, errors.CheckpointError, errors.StreamError}
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DeltaTrackerError) and kind not in bases
    }
    assert _rows("Operations") == raised


def test_every_example_and_every_command_is_listed() -> None:
    examples = {path.stem for path in (_ROOT / "examples").glob("*.py")} - {"__init__"}
    assert _rows("Examples") == examples
    listed = {call.removeprefix("delta-tracker ").split()[0] for call in _rows("Command line")}
    assert listed == set(commands.list_commands(click.Context(commands)))
