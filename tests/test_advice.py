"""Each error of the library that advises something: a test follows the advice and shows that it helps.

The marker ``@pytest.mark.advice("CorruptPartError: checked_pieces check_size")`` belongs to a test that
provokes an error which one of these functions makes, does what the message says, and checks that it helps. Functions
that are listed together give the same advice for the same kind of cause; the test has to meet one of them, which
``tests/conftest.py`` checks. All functions of the package are found in its source, so that a new error needs a test.
An ``InvalidArgumentError`` needs none if its advice is to correct an argument and begins with one of ``_CORRECTIONS``;
``tests/mistakes.py`` makes such mistakes.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tests.raise_sites import ERRORS, Site, advice_of, calls_of, followed, sites

_ROOT = Path(__file__).parent.parent

# First words of advice that corrects an argument of the same call.
_CORRECTIONS = set("Choose Give Keep Leave Map Move Name Omit Pass Remove Return Spell Use Write".split())  # noqa: SIM905

# No test can follow: it needs a package or a release that is not installed.
_OTHER_RELEASES = {"MissingExtraError", "NewerFormatError"}
_OTHER_SITES = {Site("InvalidArgumentError", "_loaded"), Site("StateMismatchError", "parse")}


def _needs_a_test(site: Site, calls: list[ast.AST]) -> bool:
    if site in _OTHER_SITES:
        return False
    if site.error == "InvalidArgumentError":
        return not all(advice_of(site, call) <= _CORRECTIONS for call in calls)
    return site.error not in _OTHER_RELEASES


def test_a_test_follows_the_advice_of_each_error() -> None:
    found = sites()
    marked = {site for each in followed().values() for site in each}
    assert not sorted({site for site, calls in found.items() if _needs_a_test(site, calls)} - marked)
    assert not sorted(marked - found.keys()), "these functions do not make such an error"
    assert {site.error for site in found} == ERRORS.keys()


def test_a_missing_package_is_in_the_extra_that_the_error_names() -> None:
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = calls_of("MissingExtraError")
    missing = [call.args for call in calls] + [call.args[1:] for call in calls_of("import_optional")]
    assert len(missing) >= 18
    for arguments in missing:
        package, extra = map(_constant, arguments)
        names = [re.match(r"[\w-]+", line).group() for line in extras[extra]] if extra else [package]
        assert package in (None, *names), f"{package} of {extra}"


def _constant(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) else None
