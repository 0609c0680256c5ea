"""The README and the documents that it links: their length, tables, commands, links, and the files that they name."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from delta_tracker import errors
from delta_tracker.cli.commands import commands
from tests import promises

_ROOT = Path(__file__).parent.parent

_README = _ROOT / "README.md"

_FOLDERS = ("benchmarks", "delta_tracker", "examples", "tests")

_DOCUMENTS = sorted(path for folder in _FOLDERS for path in (_ROOT / folder).rglob("README.md"))

_BLOCKS = re.findall(r"```(\w+)\n(.*?)```", _README.read_text(), flags=re.DOTALL)

_PYTHON = [text for language, text in _BLOCKS if language == "python"]

_NUM_LINES_AT_MOST = 250


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


def _links(document: Path) -> list[tuple[Path, str]]:
    """Return the files that a document links, with the anchors in them; web addresses are left out."""
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text())
    return [(document.parent.joinpath(name).resolve() if name else document, anchor) for name, anchor in links]


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_at_most_250_lines() -> None:
    assert len(_README.read_text().splitlines()) <= _NUM_LINES_AT_MOST


def test_the_quickstarts_have_twelve_and_fifteen_lines() -> None:
    assert len(_PYTHON[0].splitlines()) <= 12
    assert len(_PYTHON[1].splitlines()) <= 15


def test_commands_are_targets_of_the_makefile() -> None:
    commands = [line for language, text in _BLOCKS if language == "sh" for line in text.splitlines()]
    assert commands == ["make demo", "make test"]
    makefile = (_ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, flags=re.MULTILINE)


def test_the_other_documents_name_targets_of_the_makefile() -> None:
    makefile = (_ROOT / "Makefile").read_text()
    for document in _DOCUMENTS:
        for target in re.findall(r"`make ([\w-]+)`", document.read_text()):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (_name(document), target)


def test_every_promise_is_shown_by_a_test() -> None:
    shown = promises.shown_by()
    assert shown.keys() == promises.PROMISES.keys(), "a marker names no promise"
    assert all(shown.values())
    assert promises.table_of(_README.read_text()) == promises.markdown(), "run python -m tests.promises"


def test_every_document_is_linked_from_the_readme() -> None:
    linked = {path for path, _ in _links(_README)}
    assert {_name(path) for path in _DOCUMENTS} == {
        "benchmarks/README.md",
        "benchmarks/faults/README.md",
        "delta_tracker/README.md",
        "delta_tracker/monitor/README.md",
        "examples/README.md",
        "examples/cpp_reader/README.md",
        "tests/README.md",
        "tests/conformance/README.md",
    }
    assert {_ROOT / "CHANGELOG.md", _ROOT / "delta_tracker/stream/FORMAT.md", *_DOCUMENTS} <= linked


@pytest.mark.parametrize("document", [_README, *_DOCUMENTS], ids=_name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for path, anchor in _links(document):
        assert path.exists(), path
        assert not anchor or anchor in _anchors(path), (_name(path), anchor)


@pytest.mark.parametrize("document", [_README, *_DOCUMENTS], ids=_name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    for name in set(re.findall(r"`((?:tests|delta_tracker|examples|benchmarks)/[\w/.-]+)`", document.read_text())):
        assert (_ROOT / name).exists(), name


@pytest.mark.parametrize("document", [_README, *_DOCUMENTS], ids=_name)
def test_programs_that_a_document_names_exist(document: Path) -> None:
    for name in set(re.findall(r"-m ((?:tests|delta_tracker|examples|benchmarks)[\w.]*)", document.read_text())):
        if name == "examples.NAME":
            continue
        path = _ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def _rows(document: Path, title: str) -> set[str]:
    """Return the names in backticks in the first column of a section's tables."""
    section = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert section is not None, title
    firsts = re.findall(r"^\| (`[^|]+) \|", section[1], flags=re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}


def test_every_error_has_a_cause_and_a_remedy() -> None:
    bases = {errors.DeltaTrackerError, errors.CheckpointError, errors.StreamError, errors._CausedError}
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DeltaTrackerError) and kind not in bases
    }
    assert _rows(_ROOT / "delta_tracker" / "README.md", "Errors") == raised


def test_every_example_and_every_command_is_listed() -> None:
    examples = {path.stem for path in (_ROOT / "examples").glob("*.py")} - {"__init__"} | {"quickstart"}
    assert _rows(_ROOT / "examples" / "README.md", "Examples") == examples
    listed = {call.removeprefix("delta-tracker ").split()[0] for call in _rows(_README, "Command line")}
    assert listed == set(commands.list_commands(click.Context(commands)))
