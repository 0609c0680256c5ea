"""Mutations of :mod:`tests.reverts`, on small programs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.reverts.every import apply, outdated
from tests.reverts.mutation import DoesNothing, Loses, Mutation, OutdatedError, Replaces, Returns
from tests.reverts.revert import Revert

_CODE = '''
import contextlib

class Copy:
    """A copy."""

    def result(self, source, stream=None):
        """Return it."""
        if self.is_running and source > 0:
            self.copied.wait()  # for the device
        self.source = None
        for each in source:
            stream.wait(each)
        if self.host is None:
            raise LookupError(f"{source} is missing")
        return self.host.over(source, stream, into=[self.host])

    @contextlib.contextmanager
    def reading(self):
        def later():
            stop(self)

        stop(self)
        yield self

def stop(copy):
    copy.is_running = False
'''
_OTHER = """
def stop(): pass
def started(): stop()
"""


def _mutated(mutation: Mutation, code: str = _CODE) -> str:
    trees = {"package.copies": ast.parse(code), "package.others": ast.parse(_OTHER)}
    assert mutation.mutate(trees) == "package.copies"
    return ast.unparse(trees["package.copies"])


def _with(*pairs: tuple[str, str], code: str = _CODE) -> str:
    for now, other in pairs:
        assert code.count(now) == 1
        code = code.replace(now, other)
    return ast.unparse(ast.parse(code))


@pytest.mark.parametrize(
    ("mutation", "now", "other"),
    [
        (Loses("Copy.result", "self.copied.wait()"), "self.copied.wait()", "pass"),
        (Loses("Copy.result", "wait()"), "self.copied.wait()", "pass"),
        (Loses("Copy.result", "wait(...)", nth=2), "stream.wait(each)", "pass"),
        (Loses("Copy.result", "stream.wait(_)"), "stream.wait(each)", "pass"),
        (Loses("Copy.result", "self.source"), "self.source = None", "pass"),
        (Loses("Copy.result", "LookupError(...)"), 'raise LookupError(f"{source} is missing")', "pass"),
        (Loses("Copy.reading", "stop(...)"), "        stop(self)\n        yield", "        pass\n        yield"),
        (Loses("Copy.reading.later", "stop(...)"), "            stop(self)", "            pass"),
        (Replaces("Copy.result", "source > 0", "True"), "source > 0", "True"),
        (Replaces("Copy.result", "_ > 0", "_"), "source > 0", "source"),
        (Replaces("Copy.result", "over(...)", "_[1:]"), "into=[self.host])", "into=[self.host])[1:]"),
        (
            Replaces("Copy.result", "self.host.over(_, _, into=[_])", "_"),
            "self.host.over(source, stream, into=[self.host])",
            "source",
        ),
        (Replaces("Copy.result", "stream", "None", nth=1), "stream.wait", "None.wait"),
        (Replaces("Copy.result", 'f"{source} is missing"', "'gone'"), 'f"{source} is missing"', "'gone'"),
        (Returns("copies.stop", "copy"), "copy.is_running = False", "return copy"),
        (DoesNothing("package.copies.stop"), "copy.is_running = False", "pass"),
    ],
    ids=str,
)
def test_a_function_is_changed(mutation: Mutation, now: str, other: str) -> None:
    assert _mutated(mutation) == _with((now, other))


def test_a_generator_that_does_nothing_is_empty() -> None:
    names: dict[str, object] = {}
    code = "class A:\n    def b(self):\n        yield 1\n"
    exec(_mutated(DoesNothing("A.b"), code), names)
    assert list(names["A"]().b()) == []  # type: ignore[operator]


def test_neither_words_nor_the_place_nor_the_other_code_matter() -> None:
    moved = _CODE.replace("for the device", "reworded").replace("class Copy", "later = 1\n\nclass Copy")
    moved = moved.replace('f"{source} is missing"', 'f"{source} "\n                "is missing"')
    moved = moved.replace("        self.source = None\n", "").replace("each", "one")
    moved = moved.replace("source > 0", "(\n            source  > 0\n        )")
    for mutation, now in (
        (Loses("Copy.result", "self.copied.wait()"), "self.copied.wait()"),
        (Replaces("Copy.result", "source > _", "pass_"), "(\n            source  > 0\n        )"),
    ):
        other = "pass" if isinstance(mutation, Loses) else "pass_"
        assert _mutated(mutation, moved) == _with((now, other), code=moved)


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (DoesNothing("Copy.results"), r"Copy.results was not found: write its new name, or delete the revert"),
        (DoesNothing("opy.result"), r"opy.result was not found"),
        (DoesNothing("Copy"), r"Copy was not found"),
        (DoesNothing("stop"), r"stop is package.copies.stop and package.others.stop: write a longer name"),
        (Loses("Copy.result", "close(...)"), r"Copy.result in package.copies: it has no statement close\(...\): write"),
        (Loses("Copy.result", "wait(...)"), r"it has 2 times the statement wait\(...\): say with nth= which one"),
        (Loses("Copy.result", "wait(...)", nth=3), r"it has 2 times the statement"),
        (Loses("Copy.result", "stop(...)"), r"it has no statement stop"),
        (Replaces("Copy.result", "source > 1", "True"), r"it has no expression source > 1: write"),
        (Replaces("Copy.result", "over(source, stream)", "_"), r"it has no expression over"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_code_is_named(mutation: Mutation, message: str) -> None:
    with pytest.raises(OutdatedError, match=message):
        _mutated(mutation)


def test_reverts_are_applied_to_a_folder_and_compared_with_it(tmp_path: Path) -> None:
    package = tmp_path / "delta_tracker"
    package.mkdir()
    (package / "copies.py").write_text(_CODE)
    (tmp_path / "test_copies.py").write_text("def test_it(): ...\n")
    both = Revert("it neither waits nor stops", Loses("Copy.result", "self.copied.wait()"), DoesNothing("stop"))
    found = "test_copies.py::test_it[1]"
    assert outdated([(found, both), ("test_copies.py", Revert("listed"))], tmp_path) == []
    apply(both, tmp_path)
    assert (package / "copies.py").read_text() == _with(
        ("self.copied.wait()", "pass"), ("copy.is_running = False", "pass")
    )
    gone = [("test_copies.py::test_its", both), ("test_copy.py::test_it", Revert("listed"))]
    problems = outdated(gone, tmp_path)
    assert [each.partition(":")[0] for each in problems] == [both.defect, both.defect, "listed"]
    assert "test_copies.py::test_its was not found: name another test that finds it" in problems[0]
    assert "it has no statement self.copied.wait()" in problems[1]
