"""Table of the shardings, kernels, modules and modes that are tracked exactly.

``python -m benchmarks.conformance --markdown -``. It trains every combination that TorchRec supports on CPU, on several
ranks, compares the reported rows with copies of the tables, and writes the table from the results. It needs a checkout,
because it uses the tests' ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from delta_tracker import TrackingMode
from tests.ranks import RankPool

_CASES = "tests.tracker.conformance_cases"

MODULES = ("EC", "EBC")
KERNELS = ("FUSED", "FUSED_UVM", "FUSED_UVM_CACHING", "DENSE")
MODES = tuple(mode.name for mode in TrackingMode)
ROWWISE_MODES = ("MOMENTUM_DIFF", "ROWWISE_ADAGRAD")
MOMENTUM_MODES = ("MOMENTUM_LAST", *ROWWISE_MODES)

# Sharding to kind and ranks of its table, on two ranks of one host, and on four ranks of two hosts.
TWO_RANKS = {
    "TABLE_WISE": "table:1",
    "ROW_WISE": "row",
    "COLUMN_WISE": "column:0,1",
    "TABLE_ROW_WISE": "table_row:0",
    "TABLE_COLUMN_WISE": "table_column:0,1",
    "DATA_PARALLEL": "data",
}
FOUR_RANKS = {
    "TABLE_ROW_WISE": "table_row:1",
    "TABLE_COLUMN_WISE": "table_column:2,3",
    "GRID_SHARD": "grid:0,1",
}
EBC_ONLY = ("TABLE_ROW_WISE", "TABLE_COLUMN_WISE", "GRID_SHARD")
SHARDINGS = (*(name for name in TWO_RANKS if name != "DATA_PARALLEL"), "GRID_SHARD", "DATA_PARALLEL")

NO_SHARDING = "TorchRec cannot shard an EmbeddingCollection this way"
NO_EC_DENSE = "TorchRec's own EmbeddingCollection fails on CPU: wrong shapes, corrupted memory"
NO_FUSED_COPY = "TorchRec supports DATA_PARALLEL with the DENSE kernel only"

_LETTERS = dict(zip(MODES, "IELDR", strict=True))


def torchrec_limit(sharding: str, kernel: str, module: str) -> str | None:
    """Return the reason why TorchRec does not support a combination on CPU, None if it does."""
    if module == "EC" and sharding in EBC_ONLY:
        return NO_SHARDING
    if sharding == "DATA_PARALLEL" and kernel != "DENSE":
        return NO_FUSED_COPY
    if module == "EC" and kernel == "DENSE":
        return NO_EC_DENSE
    return None


@dataclass(frozen=True, slots=True)
class Group:
    """Cells of the table that share a model.

    Args:
        module: "EC" or "EBC".
        kernel: kernel of all tables.
        world_size: number of ranks, two per host.
        optimizer: fused optimizer; the DENSE kernel uses Adam instead.
    """

    module: str
    kernel: str
    world_size: int = 2
    optimizer: str = "RowWiseAdagrad"

    @property
    def places(self) -> dict[str, str]:
        """Sharding to kind and ranks of its table."""
        places = {2: TWO_RANKS, 4: FOUR_RANKS}[self.world_size]
        if self.optimizer != "RowWiseAdagrad":
            places = {"ROW_WISE": "row"}
        return {name: place for name, place in places.items() if not torchrec_limit(name, self.kernel, self.module)}

    def expected(self, mode: str) -> str:
        """Return the expected verdict of a mode: "refused" if the optimizer does not support it, else "exact"."""
        refused = {"RowWiseAdagrad": (), "Adagrad": ROWWISE_MODES, "SGD": MOMENTUM_MODES}[self.optimizer]
        return "refused" if mode in (MOMENTUM_MODES if self.kernel == "DENSE" else refused) else "exact"

    def run(self, ranks: RankPool) -> dict[str, dict[str, str]]:
        """Train the model. Return sharding to mode to "exact", "refused" or the error."""
        answers = ranks.run(
            f"{_CASES}:verdicts",
            timeout_seconds=120,
            places=self.places,
            kernel=self.kernel.lower(),
            bag=self.module == "EBC",
            optimizer=self.optimizer,
            # GRID_SHARD splits columns by host, and TorchRec's shards have at least 128 columns
            dim=256 if "GRID_SHARD" in self.places else 8,
            local_size=2,
        )
        return {
            name: {mode: _agreed([answer[name][mode] for answer in answers]) for mode in MODES} for name in self.places
        }


def _agreed(verdicts: Sequence[str]) -> str:
    """Return the common verdict of the ranks that hold rows of a table, or all verdicts if they differ."""
    said = sorted(set(verdicts) - {"no rows"})
    return said[0] if len(said) == 1 else f"FAILED: {said}"


GROUPS = (
    *(Group("EC", kernel) for kernel in KERNELS if kernel != "DENSE"),
    *(Group("EBC", kernel) for kernel in KERNELS),
    *(Group("EBC", kernel, world_size=4) for kernel in KERNELS),
    *(Group(module, "FUSED", optimizer=optimizer) for optimizer in ("Adagrad", "SGD") for module in MODULES),
)


@dataclass(slots=True)
class Results:
    """Verdicts of all cells."""

    cells: dict[tuple[str, str, str], list[Mapping[str, str]]] = field(default_factory=dict)
    optimizers: dict[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, group: Group, found: Mapping[str, Mapping[str, str]]) -> None:
        """Add the results of a group."""
        for sharding, verdicts in found.items():
            if group.optimizer == "RowWiseAdagrad":
                self.cells.setdefault((sharding, group.kernel, group.module), []).append(verdicts)
            else:
                self.optimizers[group.module, group.optimizer] = verdicts
            for mode, verdict in verdicts.items():
                if verdict != group.expected(mode):
                    self.faults.append(f"{group} {sharding} {mode}: {verdict}, expected {group.expected(mode)}")

    def markdown(self) -> str:
        """Return the table of benchmarks/results/conformance.md."""
        reasons: list[str] = []
        lines = [f"| | {' | '.join(f'`{kernel}`' for kernel in KERNELS)} |", "|---" * (len(KERNELS) + 1) + "|"]
        for module in MODULES:
            for sharding in SHARDINGS:
                row = [self._cell(sharding, kernel, module, reasons) for kernel in KERNELS]
                lines.append(f"| {module} `{sharding}` | {' | '.join(row)} |")
        for (module, optimizer), verdicts in self.optimizers.items():
            lines.append(f"| {module} `ROW_WISE`, {optimizer} | {_letters([verdicts])} | | | |")
        letters = ", ".join(f"{letter} `{mode}`" for mode, letter in _LETTERS.items())
        notes = [f"{number}: {reason}." for number, reason in enumerate(reasons, 1)]
        legend = (
            f"Modes that are exact: {letters}. A missing mode is rejected when the tracker is built, because the"
            " optimizer does not support it. Row-wise Adagrad unless another optimizer is named; Adam with `DENSE`."
        )
        return "\n".join([*lines, "", legend, " ".join(notes), ""])

    def _cell(self, sharding: str, kernel: str, module: str, reasons: list[str]) -> str:
        limit = torchrec_limit(sharding, kernel, module)
        if limit is None:
            return _letters(self.cells.get((sharding, kernel, module), []))
        if limit not in reasons:
            reasons.append(limit)
        return f"- ({reasons.index(limit) + 1})"


def _letters(runs: Sequence[Mapping[str, str]]) -> str:
    """Return the letters of the modes that were exact in every run of a cell, and a note on failed modes."""
    if not runs:
        return "NOT RUN"
    verdicts = {mode: {run[mode] for run in runs} for mode in MODES}
    exact = " ".join(letter for mode, letter in _LETTERS.items() if verdicts[mode] == {"exact"})
    failed = [mode for mode in MODES if verdicts[mode] not in ({"exact"}, {"refused"})]
    return f"{exact} **FAILED: {', '.join(failed)}**" if failed else exact


def run_all(ranks: Mapping[int, RankPool], report: Callable[[str], object] = lambda _: None) -> Results:
    """Run every group on the pool of its world size."""
    results = Results()
    for group in GROUPS:
        report(f"{group.module} {group.kernel} {group.optimizer}, {group.world_size} ranks")
        results.add(group, group.run(ranks[group.world_size]))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cells. Return 0 if all verdicts are as expected."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description="Run the conformance table.")
    parser.add_argument("--markdown", default="-", help="file to write the table to; - is standard output")
    markdown = parser.parse_args(arguments).markdown
    pools = {size: RankPool(size) for size in (2, 4)}
    try:
        results = run_all(pools, lambda line: sys.stderr.write(f"{line}\n"))
    finally:
        for pool in pools.values():
            pool.stop()
    if markdown == "-":
        sys.stdout.write(results.markdown())
    else:
        Path(markdown).write_text(results.markdown())
    for fault in results.faults:
        sys.stderr.write(f"{fault}\n")
    return bool(results.faults)


if __name__ == "__main__":
    raise SystemExit(main())
