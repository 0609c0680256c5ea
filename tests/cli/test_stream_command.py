"""Numbers on the command line: those that no command can use are refused by every option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Cli, url_of
from tests.stream.streams import Writer

_PLAN = ("plan", "--table", "1kx4", "--changed", "0.1")


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", "-inf"])
@pytest.mark.parametrize(
    "call",
    [
        ("tail", "URL", "--every"),
        ("top", "URL", "--once", "--every"),
        ("top", "URL", "--once", "--window"),
        ("mirror", "URL", "DST", "--once", "--poll"),
        ("sink", "URL", "lmdb:///nowhere", "--poll"),
        ("takeover", "URL", "--wait"),
        (*_PLAN, "--every"),
        (*_PLAN, "--poll"),
        (*_PLAN, "--json", "--bandwidth"),
        (*_PLAN, "--json", "--price-a"),
        (*_PLAN, "--json", "--price-b"),
        ("plan", "--table", "1kx4", "--changed"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_not_finite_is_refused(
    cli: Cli, writer: Writer, tmp_path: Path, call: tuple[str, ...], number: str
) -> None:
    words = {"URL": url_of(writer), "DST": (tmp_path / "copy").as_uri()}
    assert cli(*(words.get(each, each) for each in call), number, code=2) == ""
    assert f"Invalid value for '{call[-1]}': " in cli.err
    assert not (tmp_path / "copy").exists()


def test_usual_numbers_are_accepted(cli: Cli) -> None:
    assert cli.json(*_PLAN, "--every", "1e9", "--price-a", "0")["seconds_between_versions"] == 1e9
    cli(*_PLAN, "--bandwidth", "0", code=2)
    assert "0.0 is not in the range x>0" in cli.err
