"""The documents: their links, commands and tables, and the files, programs and errors that they name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from delta_tracker.cli.commands import commands
from delta_tracker.stream.storage import url
from tests import promises
from tests.documents import DOCUMENTS, GUIDE, README, ROOT, name_of
from tests.raise_sites import ERRORS

_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def _links(document: Path) -> list[tuple[Path, str]]:
    """Return the files that a document links, with the anchors in them; web addresses are left out."""
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text())
    return [(document.parent.joinpath(name).resolve() if name else document, anchor) for name, anchor in links]


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@_each_document
def test_a_document_names_targets_of_the_makefile(document: Path) -> None:
    makefile, text = (ROOT / "Makefile").read_text(), document.read_text()
    code = "".join(re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL))
    for target in re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", code, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@_each_document
def test_nothing_is_installed_under_a_name_that_is_not_registered(document: Path) -> None:
    """The package index has another project under one name, and could have another one under the other."""
    for line in re.findall(r"pip install ([^`#\n]*)", document.read_text()):
        assert not re.search(r"delta[-_]tracker(?!\S*\.whl)", line), f"install from a checkout or a wheel: {line}"


def test_the_metadata_name_the_versions_of_python_that_were_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [found[1] for each in project["classifiers"] if (found := re.fullmatch(r".*Python :: (3\.\d+)", each))]
    (row,) = re.findall(r"^\| Python \| (.*?) \|", (ROOT / "tests" / "README.md").read_text(), flags=re.MULTILINE)
    tested = [versions for versions in row.split("; ") if not versions.endswith(": none")]
    assert declared == re.findall(r"\b3\.\d+", " ".join(tested))
    assert project["requires-python"] == f">={declared[0]}"


def test_every_promise_is_shown_by_a_test() -> None:
    shown = promises.shown_by()
    assert shown.keys() == promises.PROMISES.keys(), "a marker names no promise"
    assert all(shown.values())
    for page, promised in promises.PAGES.items():
        assert promises.table_of(page.read_text()) == promises.markdown(promised), "run python -m tests.promises"


def test_every_document_is_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        new = {path for path, _ in _links(waiting.pop()) if path.suffix == ".md"} - reached
        reached |= new
        waiting += new
    assert not {name_of(path) for path in set(DOCUMENTS) - reached}


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150, "move it to a page of the guide"


@_each_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for path, anchor in _links(document):
        assert path.exists(), path
        assert not anchor or anchor in _anchors(path), (name_of(path), anchor)


@_each_document
def test_files_that_a_document_names_exist(document: Path) -> None:
    for name in set(re.findall(r"`((?:tests|delta_tracker|examples|benchmarks)/[\w/.-]+)`", document.read_text())):
        assert (ROOT / name).exists(), name


@_each_document
def test_programs_that_a_document_names_exist(document: Path) -> None:
    for name in set(re.findall(r"-m ((?:tests|delta_tracker|examples|benchmarks)[\w.]*)", document.read_text())):
        if name == "examples.NAME":
            continue
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def _rows(document: Path, title: str) -> set[str]:
    """Return the names in backticks in the first column of a section's tables, with those of its subsections."""
    section = re.search(
        rf"^(#+) {title}\n(.*?)(?=^(?!\1#)#+ |\Z)", document.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert section is not None, title
    firsts = re.findall(r"^\| (`[^|]+) \|", section[2], flags=re.MULTILINE)
    return {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}


def test_every_error_has_a_cause_and_a_remedy() -> None:
    raised = {name for name, kind in ERRORS.items() if not (kind.__doc__ or "").startswith("Base class")}
    assert _rows(GUIDE / "errors.md", "Errors") == raised


def test_every_example_and_every_command_is_listed() -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"} | {"quickstart"}
    listed = {name for name in _rows(ROOT / "examples" / "README.md", "Examples") if name[0] != "-"}
    assert listed == examples
    listed = {call.removeprefix("delta-tracker ").split()[0] for call in _rows(GUIDE / "operate.md", "Command line")}
    assert listed == set(commands.list_commands(click.Context(commands)))


@pytest.mark.parametrize("scheme", url.SCHEMES)
def test_the_guide_and_the_help_name_every_kind_of_store(scheme: str) -> None:
    page = GUIDE / "operate.md"
    assert f"{scheme}://" in page.read_text(), f"add it to the stores in {page.name}"
    help_text = commands.help or ""
    assert f"{scheme}://" in help_text or scheme == "memory", "add it to _HELP in delta_tracker/cli/commands.py"
