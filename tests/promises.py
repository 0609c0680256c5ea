"""The promises of the library and the tests that check them: ``python -m tests.promises`` writes the table.

The marker ``@pytest.mark.promise("lossless")`` lists a test's file; it takes one or more names of ``PROMISES``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
PAGE = _ROOT / "delta_tracker" / "guide" / "promises.md"
_BEGIN, _END = "<!-- promises -->\n", "<!-- /promises -->"

PROMISES = {
    "lossless": "No update is lost, for any order of forward, backward, `step()`, evaluation and reads, also for reads "
    "inside a backward pass",
    "supported": "Modules, kernels and optimizers that cannot be tracked exactly are rejected by name when the tracker "
    "is built",
    "minimal": "Nothing else is sent: a delta has rows whose update was written or was in progress at a cut. After a "
    "failed hook or backward pass it may have more. Evaluation and `no_grad` passes are not updates",
    "equal": "After every version the predictor equals the trainer in every row that the manifest does not count as "
    "pending: bit for bit in the table's own dtype, rounded in a smaller encoding",
    "atomic": "A process that is killed at any moment leaves no partial version, and its rows stay pending",
    "fenced": "A second publisher fences the first, whose next publish raises `FencedError` and publishes nothing",
    "independent": "Consumers are independent. A consumer that exceeds `max_bytes` is dropped, so memory is bounded, "
    "and its next read raises `NeedsSnapshotError`",
    "restored": "After a restore, at any world size and under any plan (in `MOMENTUM_DIFF` with the same column cuts), "
    "each consumer has the same pending rows, with their old values and ages. A checkpoint without tracker state makes "
    "every row pending",
    "resumed": "After `restore` or a takeover by a `Standby`, at the same number of ranks and under the same plan, "
    "training continues bit for bit. At another number of ranks, the state at the cut is "
    "equal, except for the default rows of unknown raw ids",
    "contained": "An error inside a hook never reaches the training step. It is counted, and all rows of the table "
    "become pending",
    "refused": "Invalid input changes nothing and raises a typed error that names the offender and the next step",
    "unpickled": "Nothing is unpickled. Sizes, names and offsets are checked before use",
}


def _marks(path: Path) -> Iterator[str]:
    """Yield the names of the promises in the markers of a file."""
    text = path.read_text()
    for node in ast.parse(text).body if "mark.promise" in text else ():
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    yield from (ast.literal_eval(argument) for argument in mark.args)


def shown_by() -> dict[str, list[str]]:
    """Return the files that check each promise, by its name; unknown names in markers are included."""
    found: dict[str, list[str]] = {name: [] for name in PROMISES}
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        for name in dict.fromkeys(_marks(path)):
            found.setdefault(name, []).append(f"`{path.relative_to(_ROOT)}`")
    return found


def markdown() -> str:
    """Return the table."""
    rows = [f"| {PROMISES[name]} | {', '.join(files)} |\n" for name, files in shown_by().items()]
    return "".join(["| promise | tests |\n", "|---|---|\n", *rows])


def table_of(page: str) -> str:
    """Return the table in the text of the page."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + markdown() + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
