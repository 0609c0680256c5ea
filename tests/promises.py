"""The promises of the library and the tests that check them: ``python -m tests.promises`` writes the tables.

The marker ``@pytest.mark.promise("lossless")`` lists a test's file; it takes one or more names of promises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_GUIDE = _ROOT / "delta_tracker" / "guide"
_BEGIN, _END = "<!-- promises -->\n", "<!-- /promises -->"

_PROMISES = {
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
_BETWEEN_RELEASES = {
    "streams": "Streams: a predictor follows a publisher of the other release, in both directions. It gets the same "
    "rows, bit for bit, from snapshots, deltas and merged versions of both formats. `verify` finds no damage",
    "orders": "`rollback` and `release` of one release are obeyed by the other, in both directions",
    "positions": "Saved positions: `Predictor.load_state_dict` continues from a position of the other release, in both "
    "directions. A release without `Predictor(tables=)` rejects the position of some tables with a typed error",
    "heartbeats": "Heartbeats: `fleet` and `inspect` show the predictors and publishers of the other release, in both "
    "directions",
    "fences": "A publisher of one release fences one of the other, in both directions, and continues its stream",
    "checkpoints": "Checkpoints: a tracker loads what the release before saved, with the same pending rows, and its "
    "publisher continues with a delta",
    "recovery": "Continuous checkpoints: `restore` and a `Standby` continue from a trainer of the release before, bit "
    "for bit",
    "row stores": "Row stores: a sink and its readers continue with what a sink of the release before wrote",
    "names": "Public names: each is listed [below](#names), and removed no earlier than the rule there says",
}
PAGES = {_GUIDE / "promises.md": _PROMISES, _GUIDE / "upgrade.md": _BETWEEN_RELEASES}
PROMISES = _PROMISES | _BETWEEN_RELEASES


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


def markdown(promises: dict[str, str]) -> str:
    """Return the table of some promises."""
    shown = shown_by()
    rows = [f"| {text} | {', '.join(shown[name])} |\n" for name, text in promises.items()]
    return "".join(["| promise | tests |\n", "|---|---|\n", *rows])


def table_of(page: str) -> str:
    """Return the table in the text of the page."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the tables into the pages."""
    for page, promises in PAGES.items():
        before, _, rest = page.read_text().partition(_BEGIN)
        page.write_text(before + _BEGIN + markdown(promises) + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
