"""The README's promises and the tests that show them: ``python -m tests.promises`` writes the table.

A test shows a promise by the marker ``@pytest.mark.promise("lossless")``, with one or several names of ``PROMISES``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_BEGIN, _END = "<!-- promises -->\n", "<!-- /promises -->"

PROMISES = {
    "lossless": "No update is lost, whatever the order of forward, backward, `step()`, eval and reads, also inside a "
    "backward",
    "supported": "Modules, kernels and optimizers that cannot be followed exactly are refused by name when the tracker "
    "is built",
    "minimal": "Nothing else is sent: rows whose update was written, and rows whose update was under way at a cut; "
    "after a hook or a backward that failed possibly more. Evaluation and `no_grad` are no updates",
    "equal": "After every version the predictor equals the trainer, bit for bit, in every row that the manifest does "
    "not count as pending",
    "atomic": "A kill at any moment leaves no half version, and the rows pending",
    "fenced": "A second publisher fences the first, whose next publish raises `FencedError` and publishes nothing",
    "independent": "Consumers are independent; one that falls behind costs bounded memory and is told so",
    "restored": "After a restore, at any world size and under any plan, each consumer has pending what it had, with "
    "the old values and ages; a checkpoint without tracker state makes every row pending",
    "contained": "An error inside a hook never reaches the training step: it is counted, and the table's rows stay "
    "pending",
    "refused": "Bad input is refused whole, with a typed error that names the offender and the next step",
    "unpickled": "Nothing is ever unpickled; sizes, names and offsets are checked before use",
}


def _marks(path: Path) -> Iterator[str]:
    """Yield the names of the promises that the markers of a file have."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    yield from (ast.literal_eval(argument) for argument in mark.args)


def shown_by() -> dict[str, list[str]]:
    """Return the files whose tests show each promise, by its name, with names that are no promise's too."""
    found: dict[str, list[str]] = {name: [] for name in PROMISES}
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        for name in dict.fromkeys(_marks(path)):
            found.setdefault(name, []).append(f"`{path.relative_to(_ROOT)}`")
    return found


def markdown() -> str:
    """Return the table."""
    rows = [f"| {PROMISES[name]} | {', '.join(files)} |\n" for name, files in shown_by().items()]
    return "".join(["| promise | shown by |\n", "|---|---|\n", *rows])


def table_of(readme: str) -> str:
    """Return the table that stands in the README."""
    return readme.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the table into the README."""
    path = _ROOT / "README.md"
    before, _, rest = path.read_text().partition(_BEGIN)
    path.write_text(before + _BEGIN + markdown() + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
